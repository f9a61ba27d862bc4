"""Argument checks; their errors name the argument, the row and what is expected."""

from __future__ import annotations

from collections.abc import Iterable

from verl_credit.errors import did_you_mean
from verl_credit.lazy import torch


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")


def check_dims(name: str, tensor: torch.Tensor, dims: int, expected: str) -> None:
    check_tensor(name, tensor)
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {expected}")


def given(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """Returns an optional input. Raises ValueError where it is None."""
    if tensor is None:
        raise ValueError(f"{name} is None; expected a torch.Tensor")
    return tensor


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: str) -> None:
    """Raise TypeError for what is no tensor, ValueError for another `shape`; `like` names the source of that shape."""
    check_tensor(name, tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}, as {like}")


def check_name(argument: str, value: str, accepted: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `accepted`, with the nearest accepted name as a hint."""
    accepted = list(accepted)
    if value in accepted:
        return
    hint = did_you_mean(value, accepted, repr)
    raise ValueError(f"{argument}={value!r} is not known{hint}; accepted: {', '.join(accepted)}")


def as_bool(name: str, mask: torch.Tensor) -> torch.Tensor:
    """A mask as a bool tensor; other dtypes may contain only 0 and 1."""
    if mask.dtype == torch.bool:
        return mask
    bad = (mask != 0) & (mask != 1)
    refuse_rows(f"{name} is not a mask:", bad, "holds values other than 0 and 1")
    return mask != 0


def check_integers(name: str, tensor: torch.Tensor, what: str) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {tensor.dtype}; {what} are integers")


def as_group_ids(name: str, group_B: torch.Tensor) -> torch.Tensor:
    """Group ids of any integer dtype, renumbered 0, 1, ... (equal ids stay equal)."""
    check_integers(name, group_B, "group ids")
    return torch.unique(group_B, return_inverse=True)[1]


def checked_ids(
    ids_B_T: torch.Tensor, mask_B_T: torch.Tensor, name: str, mask_name: str, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of response tokens and their mask as a bool tensor, after checks of shape and dtype."""
    check_dims(name, ids_B_T, 2, "rows x response tokens")
    check_integers(name, ids_B_T, what)
    check_shape(mask_name, mask_B_T, ids_B_T.shape, name)
    return ids_B_T, as_bool(mask_name, mask_B_T)


def first_row(bad: torch.Tensor) -> int:
    """Index of the first row with a True entry."""
    return int(bad.reshape(bad.shape[0], -1).any(dim=1).nonzero()[0])


def refuse_rows(
    name: str, bad: torch.Tensor, problem: str, value_B: torch.Tensor | None = None, *, first: int = 0
) -> None:
    """Raise ValueError for the first row with a True entry, counted from ``first``.

    ``{value}`` in ``problem`` is the row's number in ``value_B``.
    """
    if bad.any():
        row = first_row(bad)
        problem = problem if value_B is None else problem.format(value=float(value_B[row]))
        raise ValueError(f"{name} row {first + row} {problem}")


def check_returned(what: str, tensor: object, member: torch.Tensor) -> torch.Tensor:
    """The result of an operator in float64. Raise ValueError for another shape, and where a member is not finite."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != member.shape:
        got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{what}: {got}; expected a tensor of shape {tuple(member.shape)}")
    bad = member & ~tensor.isfinite()
    if bad.any():
        raise ValueError(f"{what}: {float(tensor[bad][0])} in row {first_row(bad)}; expected finite numbers")
    return tensor.detach().to(torch.float64)


def output_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The widest input dtype, at least float32 (half precision cannot represent an advantage's 1e-6 terms)."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
