"""Head geometry of an attention layer, and the shapes of well-known models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from types import MappingProxyType
from typing import Any

#: Largest number that the kernels can count to.
INT32_MAX = 2**31 - 1


def whole(name: str, value: Any, least: int = 1, most: int | None = INT32_MAX) -> int:
    """A Python int from any integer type, from ``least`` to ``most``.

    Raises
    ------
    TypeError
        If ``value`` is no integer; a bool is none.
    ValueError
        If it is too small or too large.
    """
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise TypeError(f"{name} must be an integer; got {type(value).__name__} {value!r}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}; got {number}")
    return number


def cdiv(a: int, b: int) -> int:
    """Ceiling of ``a / b`` for integers, ``b > 0``."""
    return -(-a // b)


def counted(number: int, noun: str) -> str:
    """A number and what it counts, as text.

    Examples
    --------
    >>> counted(1, "request"), counted(2500, "request")
    ('1 request', '2,500 requests')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class HeadConfig:
    """How query heads share KV heads.

    Parameters
    ----------
    num_q_heads, num_kv_heads : int
        Query head ``i`` reads KV head ``i // group_size``.
    head_dim : int
        Elements of one query or key vector.
    v_head_dim : int, optional
        Elements of one value vector; ``head_dim`` when left out.

    Raises
    ------
    TypeError
        If a number is no integer.
    ValueError
        If a number is not positive or ``num_kv_heads`` does not divide ``num_q_heads``.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole(name, value))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} must divide num_q_heads {self.num_q_heads}, "
                "since each KV head serves a whole group of query heads"
            )

    @property
    def group_size(self) -> int:
        """Query heads per KV head, g = h / h_kv."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Elements of one value vector and of one output vector."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def shard(self, tensor_parallel: int) -> HeadConfig:
        """Heads of one rank when ``tensor_parallel`` ranks share the layer.

        KV heads are replicated once there are more ranks than KV heads, as engines do.
        """
        if tensor_parallel < 1 or self.num_q_heads % tensor_parallel:
            raise ValueError(
                f"tensor_parallel {tensor_parallel} must divide num_q_heads {self.num_q_heads}"
            )
        return replace(
            self,
            num_q_heads=self.num_q_heads // tensor_parallel,
            num_kv_heads=max(1, self.num_kv_heads // tensor_parallel),
        )


#: Published head counts of one attention layer, by model.
presets: Mapping[str, HeadConfig] = MappingProxyType(
    {
        "llama-3-8b": HeadConfig(32, 8, 128),
        "llama-3-70b": HeadConfig(64, 8, 128),
        "llama-3-70b-tp8": HeadConfig(8, 1, 128),
        "llama-2-7b": HeadConfig(32, 32, 128),
        "llama-3.2-1b": HeadConfig(32, 8, 64),
        "mistral-7b": HeadConfig(32, 8, 128),
        "qwen-2.5-7b": HeadConfig(28, 4, 128),
        "qwen-3-32b": HeadConfig(64, 8, 128),
        "gemma-2-9b": HeadConfig(16, 8, 256),
        "phi-3-mini": HeadConfig(32, 32, 96),
        "falcon-7b": HeadConfig(71, 1, 64),
    }
)

#: Published numbers of attention layers of the same models.
preset_layers: Mapping[str, int] = MappingProxyType(
    {
        "llama-3-8b": 32,
        "llama-3-70b": 80,
        "llama-3-70b-tp8": 80,
        "llama-2-7b": 32,
        "llama-3.2-1b": 16,
        "mistral-7b": 32,
        "qwen-2.5-7b": 28,
        "qwen-3-32b": 64,
        "gemma-2-9b": 42,
        "phi-3-mini": 32,
        "falcon-7b": 32,
    }
)
