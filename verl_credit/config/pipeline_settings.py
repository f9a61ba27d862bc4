"""The keys of outcome and token level, resolved, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import OmegaConf

from verl_credit.credit.token.token_transforms import TRANSFORMS

CANONICAL = ("gtpo_canonical", "grpo_s")
SEPA_KEYS = (
    "steps",
    "schedule",
    "delay_steps",
    "correct_rate_gate",
    "ema_decay",
    "var_threshold",
    "warmup",
    "ramp_from",
)


@dataclass(frozen=True)
class PipelineSettings:
    """Names are those of the configuration below ``algorithm``."""

    advantage_mode: str = "grpo"
    tied_groups: str = "keep"
    transform_mode: str = "none"
    algorithm_mode: str | None = None
    uncertainty_kind: str = "surprisal"
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    entropy_mask_rho: float = 0.2
    population: str = "all"
    alpha_1: float = 1.0
    alpha_2: float = 0.1
    beta_1: float = 1.0
    beta_2: float = 0.1
    entropy_clip: tuple[float, float] | None = None
    detector: str = "grams"
    planning_model: str | None = None
    planning_threshold: float = 0.02
    strategic_grams: str | list[str] | None = None
    sepa: dict = field(default_factory=dict)
    advantage_params: dict = field(default_factory=dict)
    transform_params: dict = field(default_factory=dict)
    algorithm_params: dict = field(default_factory=dict)

    @classmethod
    def from_config(cls, config) -> PipelineSettings:
        node = OmegaConf.to_container(config.algorithm, resolve=True)
        clip = node["canonical"]["entropy_clip"]
        return cls(
            advantage_mode=node["advantage_mode"],
            tied_groups=node["tied_groups"],
            transform_mode=node["transform_mode"],
            algorithm_mode=node["algorithm_mode"] or None,
            uncertainty_kind=node["uncertainty_kind"],
            gtpo_beta=float(node["gtpo"]["beta"]),
            hicra_alpha=float(node["hicra"]["alpha"]),
            entropy_mask_rho=float(node["entropy_mask"]["rho"]),
            population=node["canonical"]["population"],
            **{name: float(node["canonical"][name]) for name in ("alpha_1", "alpha_2", "beta_1", "beta_2")},
            entropy_clip=None if clip is None else (float(clip[0]), float(clip[1])),
            detector=node["planning"]["detector"],
            planning_model=node["planning"]["model"],
            planning_threshold=float(node["planning"]["threshold"]),
            strategic_grams=node["strategic_grams"],
            sepa={name: node["sepa"][name] for name in SEPA_KEYS},
            advantage_params=node["advantage_params"] or {},
            transform_params=node["transform_params"] or {},
            algorithm_params=node["algorithm_params"] or {},
        )

    @property
    def token_level(self) -> bool:
        """Advantages differ between tokens of a turn."""
        return self.transform_mode != "none" or self.algorithm_mode is not None

    @property
    def canonical(self) -> bool:
        return self.transform_mode in CANONICAL

    @property
    def own_transform(self) -> bool:
        """A user's transform by dotted path."""
        return self.transform_mode not in TRANSFORMS and not self.canonical

    @property
    def replaces_turns(self) -> bool:
        """Advantages are not made from turns at all."""
        return self.canonical or self.algorithm_mode is not None

    def banner(self) -> list[str]:
        """What is active, in the order in which it acts."""
        if self.algorithm_mode:
            return [f"algorithm={self.algorithm_mode}"]
        parts = [f"outcome={self.advantage_mode}"] if not self.canonical else []
        if self.transform_mode != "none":
            parts.append(f"tokens={self.transform_mode}")
        transform = TRANSFORMS.get(self.transform_mode)
        if transform is not None and transform.weighted:
            parts.append(f"uncertainty={self.uncertainty_kind} beta={self.gtpo_beta:g}")
        if transform is not None and transform.uses_sepa_controller:
            sepa = self.sepa
            parts.append(
                f"sepa={sepa['schedule']}/{sepa['steps']}+{sepa['delay_steps']} gate={sepa['correct_rate_gate']:g}"
            )
        if transform is not None and transform.amplified:
            parts.append(f"hicra={self.hicra_alpha:g}")
        if transform is not None and transform.needs_planning:
            parts.append(f"planning={self.detector}")
        if self.tied_groups != "keep":
            parts.append(f"tied_groups={self.tied_groups}")
        return parts
