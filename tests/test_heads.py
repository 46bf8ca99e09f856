"""Head geometry."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from cupy_decode.heads import HeadConfig, preset_layers, presets


def test_group_size_and_value_dim():
    heads = HeadConfig(num_q_heads=32, num_kv_heads=8, head_dim=128)
    assert heads.group_size == 4
    assert heads.value_dim == 128
    assert HeadConfig(16, 1, 192, v_head_dim=128).value_dim == 128


@pytest.mark.parametrize(
    ("ranks", "q_heads", "kv_heads"), [(1, 64, 8), (2, 32, 4), (8, 8, 1), (16, 4, 1), (64, 1, 1)]
)
def test_shard_replicates_kv_heads_once_they_run_out(ranks, q_heads, kv_heads):
    shard = HeadConfig(64, 8, 128, v_head_dim=64).shard(ranks)
    assert shard == HeadConfig(q_heads, kv_heads, 128, v_head_dim=64)


@pytest.mark.parametrize("ranks", [0, -1, 3, 128])
def test_shard_needs_a_divisor(ranks):
    with pytest.raises(ValueError, match=f"tensor_parallel {ranks} must divide num_q_heads 64"):
        HeadConfig(64, 8, 128).shard(ranks)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(33, 2), (3, 2), (2, 4)])
def test_groups_must_be_whole(q_heads, kv_heads):
    with pytest.raises(
        ValueError, match=f"num_kv_heads {kv_heads} must divide num_q_heads {q_heads}"
    ):
        HeadConfig(q_heads, kv_heads, 64)


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"])
@pytest.mark.parametrize("value", [0, -4])
def test_numbers_must_be_positive(name, value):
    numbers = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, name: value}
    with pytest.raises(ValueError, match=f"^{name} must be at least 1; got {value}"):
        HeadConfig(**numbers)


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"])
@pytest.mark.parametrize("value", [4.0, True, "4", np.float32(4)])
def test_numbers_must_be_integers(name, value):
    numbers = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, name: value}
    with pytest.raises(TypeError, match=f"^{name} must be an integer; got {type(value).__name__} "):
        HeadConfig(**numbers)


def test_integers_of_any_type_are_heads():
    heads = HeadConfig(np.int64(8), np.uint8(2), np.int32(64))
    assert heads == HeadConfig(8, 2, 64)
    assert type(heads.num_kv_heads) is int


def test_heads_are_values():
    heads = presets["llama-3-8b"]
    assert heads == HeadConfig(32, 8, 128)
    assert hash(heads) == hash(HeadConfig(32, 8, 128))
    with pytest.raises(FrozenInstanceError):
        heads.head_dim = 64
    with pytest.raises(TypeError):
        presets["llama-3-8b"] = heads


def test_presets_agree_with_sharding():
    assert presets["llama-3-70b-tp8"] == presets["llama-3-70b"].shard(8)
    assert presets["falcon-7b"].group_size == 71


def test_every_preset_says_how_many_layers_there_are():
    assert set(preset_layers) == set(presets)
    assert preset_layers["llama-3-70b"] == preset_layers["llama-3-70b-tp8"] == 80
    assert min(preset_layers.values()) == preset_layers["llama-3.2-1b"] == 16
