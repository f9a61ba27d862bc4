"""The families that the installed transformers does not have. Only these five may be missing, in the oldest of our range."""

from transformers import CONFIG_MAPPING

MISSING = {
    name for name in ("hy_v3", "cohere2_moe", "laguna", "deepseek_v4", "mellum") if name not in CONFIG_MAPPING
}
