"""The planning mask of a batch: tokenizer and encoder are brought here, the detectors live in ``credit/``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from verl_credit.config.keys import Algorithm
from verl_credit.credit.planning.anchors import planning_mask_by_anchors
from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, parse_grams, planning_mask
from verl_credit.credit.plugins import load

Detector = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def planning_detector(settings: Algorithm, tokenizer) -> Detector:
    """``f(token_ids_B_T, mask_B_T) -> planning_B_T`` of the configured detector.

    A detector of the user's is ``f(token_ids_B_T, mask_B_T, decode)``; what it returns is checked.
    """
    decode = pieces_of(tokenizer)
    if settings.planning.detector == "grams":
        grams = STRATEGIC_GRAMS if settings.strategic_grams is None else parse_grams(settings.strategic_grams)
        return partial(planning_mask, decode=decode, grams=grams)
    if settings.planning.detector == "anchors":
        encode = _sentence_encoder(settings.planning.model)
        return partial(
            planning_mask_by_anchors, decode=decode, encode=encode, threshold=settings.planning.threshold
        )
    own = load(settings.planning.detector, "algorithm.planning.detector")

    def detect(token_ids_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
        found = torch.as_tensor(own(token_ids_B_T, mask_B_T, decode))
        if found.shape != mask_B_T.shape or not bool(((found == 0) | (found == 1)).all()):
            raise ValueError(
                f"algorithm.planning.detector={settings.planning.detector!r} returned shape {tuple(found.shape)} "
                f"({found.dtype}); expected a mask of shape {tuple(mask_B_T.shape)}"
            )
        return found.bool() & mask_B_T.bool()

    return detect


def pieces_of(tokenizer) -> Callable[[list[int]], list[str]]:
    """Token ids to their pieces of text, each by itself."""

    def decode(token_ids: list[int]) -> list[str]:
        return tokenizer.batch_decode([[i] for i in token_ids], clean_up_tokenization_spaces=False)

    return decode


def _sentence_encoder(folder: str) -> Callable[[list[str]], torch.Tensor]:
    from verl_credit_retriever.encoder import SentenceEncoder

    encoder = SentenceEncoder(folder, query_prefix="")
    return lambda texts: torch.from_numpy(encoder.encode_queries(texts))
