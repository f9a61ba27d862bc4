"""verl on a machine without an accelerator: a platform named "cpu" and an FSDP2 engine over gloo."""

from verl_credit.host.cpu.register import register

__all__ = ["register"]
