"""Replays: caching against a plain LRU, live traffic against its own bookkeeping."""

import argparse
import json
import re
from collections import OrderedDict

import numpy as np
import pytest

from cupy_decode import live_batch, plots, trace_replay
from cupy_decode.__main__ import main
from cupy_decode.heads import preset_layers, presets
from cupy_decode.paging import ShadowPool, Snapshot, audit
from cupy_decode.trace_replay import Request, generate_trace, read_trace, replay, replay_cache
from tests.shared_data import shared_path

MOONCAKE = "traces/mooncake_conversation.jsonl"


def lru_hits(requests, capacity):
    """The same rules by themselves: blocks are ids, a released chain's tail is older."""
    cache, hits = OrderedDict(), 0
    for ids in requests:
        prefix = next((i for i, x in enumerate(ids) if x not in cache), len(ids))
        hits += prefix
        for x in ids:
            cache.pop(x, None)
        while len(cache) + len(ids) > capacity:
            cache.popitem(last=False)
        cache.update(dict.fromkeys(reversed(ids)))
    return hits


# ------------------------------------------------------------------------ caching alone


@pytest.mark.parametrize("capacity", [1_000, 10_000, 30_000, 50_000, 100_000, 288_500])
def test_recorded_conversations_hit_as_often_as_in_a_plain_lru(capacity):
    requests = read_trace(shared_path(MOONCAKE))
    assert len(requests) == 12_031
    found = replay_cache(requests, capacity, progress=False)
    assert found.num_blocks == 288_500
    assert found.num_hits == lru_hits([r.hash_ids.tolist() for r in requests], capacity)
    if capacity == 288_500:
        assert found.num_hits == 105_710


@pytest.mark.parametrize("capacity", [100, 150, 300, 1000, 10_000])
def test_generated_conversations_hit_as_often_as_in_a_plain_lru(capacity):
    requests = [r for r in generate_trace(150, seed=capacity) if len(r.hash_ids) <= capacity]
    assert len(requests) > 20
    found = replay_cache(requests, capacity, progress=False)
    assert found.num_hits == lru_hits([r.hash_ids.tolist() for r in requests], capacity)
    assert 0 < found.hit_rate < 1


# ------------------------------------------------------------------------- live traffic


def test_live_replay_serves_every_token_once_and_only_sound_tables():
    requests = [
        r
        for r in generate_trace(60, seed=3, requests_per_second=20)
        if r.input_length + r.output_length <= 260 * 16
    ]
    pool = ShadowPool(num_blocks=260, block_size=16, seed=1)
    steps = []

    def on_step(allocator, running):
        assert allocator is pool
        assert pool.num_free_blocks + pool.num_cached_blocks + pool.num_used_blocks == 260
        steps.append(len(running))
        if len(steps) % 25 == 0:
            table, lens = pool.block_table(running), pool.seq_lens(running)
            assert pool.check(table, lens, running) == []

    result = replay(requests, num_blocks=260, allocator=pool, on_step=on_step, progress=False)
    assert result.num_preemptions > 0
    assert result.recomputed_tokens > 0
    assert result.num_rejected == 0
    assert result.prompt_tokens == sum(r.input_length for r in requests)
    assert result.decoded_tokens == sum(r.output_length - 1 for r in requests)
    assert 0 < result.hit_rate < 1
    assert result.num_steps == len(steps)
    assert pool.seq_ids == ()
    assert pool.num_used_blocks == 0


def test_small_memory_costs_hits_and_never_answers():
    requests = generate_trace(80, seed=5, requests_per_second=5)
    large = replay(requests, num_blocks=20_000, progress=False)
    small = replay(requests, num_blocks=400, progress=False)
    assert large.num_preemptions == large.recomputed_tokens == 0
    assert small.hit_rate < large.hit_rate
    assert small.decoded_tokens == large.decoded_tokens


def test_samples_agree_with_arithmetic_on_one_request():
    request = Request(0.0, input_length=100, output_length=61)
    result = replay(
        [request], num_blocks=20, block_size=32, kernel_block_sizes=(8, 32), step_seconds=1.0,
        prefill_tokens_per_second=100.0, sample_seconds=0.5, progress=False,
    )  # fmt: skip
    # The prompt takes a second more; the answer's first token comes with it, 60 are appended.
    s = result.samples
    assert result.num_steps == 61
    assert s["time"][:4].tolist() == [0, 2, 3, 4]
    assert s["batch"].tolist() == [1] * 60 + [0]
    lens = np.arange(101, 161)
    assert s["len_max"][:60].tolist() == lens.tolist()
    assert s["live_tokens"][:60].tolist() == lens.tolist()
    assert s["tail_slots"][:60].tolist() == (-lens % 32).tolist()
    assert s["used_blocks"][:60].tolist() == (-(-lens // 32)).tolist()
    assert s["table_bytes_32"][:60].tolist() == (4 * -(-lens // 32)).tolist()
    assert s["table_bytes_8"][:60].tolist() == (16 * -(-lens // 32)).tolist()
    slots = 32 * s["used_blocks"].sum()
    assert result.internal_fragmentation == (-lens % 32).sum() / slots
    assert result.tail_per_sequence == (-lens % 32).mean()


def test_a_request_larger_than_the_pool_is_rejected_and_the_rest_served():
    requests = [
        Request(0.0, 1000, 5),
        Request(0.0, 60, 5),
        Request(0.0, 64, 1),
        Request(1.0, 63, 3),
    ]
    result = replay(requests, num_blocks=4, progress=False)
    assert result.num_rejected == 2
    assert result.decoded_tokens == 4
    assert result.prompt_tokens == 124


def test_the_batch_is_cut_where_asked():
    requests = generate_trace(60, seed=7, requests_per_second=20)
    result = replay(requests, num_blocks=600, at=2.0, progress=False)
    batch = result.live_batch
    assert 2.0 <= batch.time < 2.5
    assert len(batch.seq_ids) == len(batch.seq_lens) == len(batch.block_table) > 3
    owners: dict[int, set] = {}
    for seq_id, row, length in zip(batch.seq_ids, batch.block_table, batch.seq_lens, strict=True):
        for block in row[: -(-length // 16)].tolist():
            assert 0 <= block < 600
            owners.setdefault(block, set()).add(seq_id)
    assert max(map(len, owners.values())) > 1, "no prefix is shared"
    found = audit(batch.block_table, batch.seq_lens, owners, block_size=16, seq_ids=batch.seq_ids)
    assert found == []
    again = replay(requests, num_blocks=600, at=2.0, progress=False).live_batch
    assert np.array_equal(again.block_table, batch.block_table)
    assert replay(requests, num_blocks=600, at=1e9, progress=False).live_batch is None


def test_preemption_takes_the_last_and_finds_its_published_blocks_again():
    # Two prompts of 32 tokens fill 4 of 5 blocks; both grow into the fifth, one has to go.
    ids = (np.array([1, 2], np.int32), np.array([3, 4], np.int32))
    requests = [Request(0.0, 32, 20, x, hash_block=16) for x in ids]
    result = replay(requests, num_blocks=5, progress=False)
    assert result.num_preemptions == 1
    assert result.decoded_tokens == 38
    # The first one takes a fourth block before it ends: the tail of the second one's prompt.
    assert result.recomputed_tokens == 16


# --------------------------------------------------------------------------- reading


def test_both_formats_are_read(tmp_path):
    mooncake = tmp_path / "a.jsonl"
    rows = [
        {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [7, 9]},
        {"timestamp": 1000, "input_length": 512, "output_length": 4, "hash_ids": [7]},
    ]
    mooncake.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_trace(mooncake)
    assert (first.arrival, first.input_length, first.output_length) == (0.0, 512, 4)
    assert second.arrival == 0.5
    assert second.prompt().tolist() == [7] * 512 + [9] * 188
    azure = tmp_path / "b.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    first, second = read_trace(str(azure))
    assert (first.arrival, first.prompt(), first.output_length) == (0.0, 4808, 10)
    assert second.arrival == pytest.approx(0.052, abs=1e-6)


GOOD = '{"timestamp": 1, "input_length": 100, "output_length": 5, "hash_ids": [0]}\n'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "", "must end in .jsonl"),
        ("a.jsonl", "", "holds no request"),
        ("a.jsonl", '{"timestamp": 1}\n', "a.jsonl, line 1: no field 'hash_ids'"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,x,1\n", "line 2: invalid"),
        ("a.csv", "TIMESTAMP,GeneratedTokens\n2023-11-16,1\n", "a.csv, line 2: no field 'Conte"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n,1,1\n", "arrival must be finite"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n", "a.csv, line 2: int"),
        ("a.jsonl", GOOD + "\n" + "{not JSON\n", "a.jsonl, line 3: Expecting property name"),
        ("a.jsonl", "7\n", "a.jsonl, line 1: a request must be a JSON object; got 7"),
        ("a.jsonl", GOOD.replace("[0]", "[0, 1]"), r"one id for each 512 tokens .* shape \(2,\)"),
        ("a.jsonl", GOOD.replace("[0]", "[4294967296]"), "a.jsonl, line 1: Python integer 4294967"),
        ("a.jsonl", GOOD.replace("100", "Infinity"), "a.jsonl, line 1: cannot convert float inf"),
        ("a.jsonl", GOOD.replace("100", "-5"), "must have a token of input and no neg"),
        ("a.jsonl", GOOD.replace(": 1,", ": NaN,"), "the time of arrival must be finite; got nan"),
    ],
)
def test_unreadable_traces_say_where(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_trace(tmp_path / name)


def test_recorded_traces_are_whole():
    conversation = read_trace(shared_path(MOONCAKE))
    assert np.mean([r.input_length for r in conversation]) == pytest.approx(12035.06, abs=0.005)
    assert len(read_trace(shared_path("traces/azure_llm_2023_code.csv"))) == 8_819
    assert len(read_trace(shared_path("traces/azure_llm_2023_conv.csv"))) == 19_366


def test_generated_traces_repeat_and_differ_by_seed():
    one, same, other = (generate_trace(30, seed=s) for s in (1, 1, 2))
    assert [r.hash_ids.tolist() for r in one] == [r.hash_ids.tolist() for r in same]
    assert [r.input_length for r in one] != [r.input_length for r in other]
    for r in one:
        assert len(r.prompt()) == r.input_length
        assert (len(r.hash_ids) - 1) * 16 <= r.input_length < len(r.hash_ids) * 16


# ---------------------------------------------------------------------- command, figure


def arguments(*options):
    parser = argparse.ArgumentParser()
    trace_replay.add_arguments(parser)
    return parser.parse_args(options)


def test_command_prints_and_draws(tmp_path, capsys):
    trace = tmp_path / "a.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 5, "hash_ids": [0, i]}
        for i in range(1, 20)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = tmp_path / "a.png"
    result = trace_replay.run(arguments(str(trace), "--memory-gib", "2", "--plot", str(figure)))
    assert result.num_blocks == 128
    assert result.cached_tokens == 18 * 512
    captured = capsys.readouterr()
    assert "19 requests, 0 rejected" in captured.out
    assert captured.out.endswith(f"\nFigure: {figure}\n")
    assert captured.err == ""  # no bar where nobody watches
    assert figure.stat().st_size > 10_000
    found = trace_replay.run(arguments(str(trace), "--cache-only"))
    assert (found.num_blocks, found.num_hits) == (38, 18)


@pytest.fixture
def short_trace(tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text(GOOD)
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--max-batch 0", "--max-batch must be at least 1; got 0"),
        ("--layers 0", "--layers must be at least 1; got 0"),
        ("--block-size 0", "--block-size must be at least 1; got 0"),
        ("--kernel-block-size 0", "kernel_block_size must be at least 1; got 0"),
        ("--kernel-block-size 24", "kernel_block_size 24 must divide block_size 128; use 16 or 32"),
        ("--prefill-rate 0", "--prefill-rate must be positive and finite; got 0.0"),
        ("--prefill-rate nan", "--prefill-rate must be positive and finite; got nan"),
        ("--step-ms 0", "--step-ms must be positive and finite; got 0.0"),
        ("--memory-gib 0", "--memory-gib must be positive and finite; got 0.0"),
        ("--memory-gib inf", "--memory-gib must be positive and finite; got inf"),
        ("--memory-gib 0.001", "--memory-gib 0.001 holds 0 blocks of 128 tokens of 32 layers of "),
        ("--memory-gib 1e9", "the pool must have from 1 to 67,108,864"),
        ("--memory-gib 0.001 --cache-only", "--memory-gib 0.001 holds 0 blocks of 512 tokens"),
        ("--at -1", "at must be a second from 0 on; got -1.0"),
        ("--at nan", "at must be a second from 0 on; got nan"),
        ("--cache-only --at 3", "leave out --at and --plot"),
    ],
)
def test_bad_options_are_refused_in_words(short_trace, capsys, options, words):
    assert main(["trace", short_trace, *options.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert words in captured.err


def test_a_bad_line_of_a_trace_is_exit_status_2(short_trace, capsys):
    with open(short_trace, "a") as file:
        file.write("{not JSON\n")
    assert main(["trace", short_trace]) == 2
    assert capsys.readouterr().err.startswith("error: short.jsonl, line 2: Expecting property name")


def test_a_pool_too_small_for_a_prefix_is_exit_status_2(tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(GOOD.replace("100", "1000").replace("[0]", "[0, 1]"))
    assert main(["trace", str(path), "--cache-only", "--memory-gib", "0.07"]) == 2
    assert "error: sequence 0 needs 2 more blocks but only 1 are" in capsys.readouterr().err


def test_a_moment_beyond_the_trace_says_when_it_ended(short_trace, capsys):
    options = ["--step-ms", "1000", "--prefill-rate", "100"]
    assert main(["trace", short_trace, "--at", "50", *options]) == 0
    words = "no sequence is in decode from 50 s on: the replay ended at 5.0 s\n"
    assert capsys.readouterr().out.endswith(words)
    assert main(["trace", short_trace, "--at", "3", *options]) == 0
    text = capsys.readouterr().out
    assert "live batch at 3.0 s, where the first step from 3 s on" in text
    assert ": 1 sequence, 103 keys; 132 SMs\n" in text


def test_a_moment_shows_what_had_arrived_and_every_plan(tmp_path, capsys):
    path = tmp_path / "three.jsonl"
    path.write_text("".join(GOOD.replace(": 1,", f": {1 + 1000 * i},") for i in range(3)))
    assert main(["trace", str(path), "--at", "0.9", "--step-ms", "950"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^1 of 3 requests arrived by 1\.0 s, 0 rejected, 2 steps", text, re.M)
    for policy in live_batch.parameterless_policies():
        (row,) = re.findall(rf"^{policy} .*$", text, re.M)
        assert " % " in row
    assert text.endswith("times of these plans need a CUDA GPU; none is visible\n")


@pytest.mark.parametrize("model", sorted(presets))
def test_the_layers_are_the_models(short_trace, capsys, model):
    heads, layers = presets[model], preset_layers[model]
    result = trace_replay.run(arguments(short_trace, "--model", model))
    token = 2 * heads.num_kv_heads * heads.head_dim * 2 * layers
    assert result.num_blocks == 60 * 2**30 // (128 * token)
    text = capsys.readouterr().out
    assert text.startswith(
        f"short.jsonl on {model}: {layers} layers of {heads.num_kv_heads} KV head"
    )
    assert f"60 GiB hold {result.num_blocks:,} blocks of 128 tokens, " in text
    assert "20 ms a step, and 1 s for 50,000 prompt tokens" in text
    more = trace_replay.run(arguments(short_trace, "--model", model, "--layers", str(2 * layers)))
    assert more.num_blocks == result.num_blocks // 2


def test_a_trace_without_ids_has_no_hit_rate(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n")
    result = trace_replay.run(arguments(str(path)))
    assert np.isnan(result.hit_rate)
    text = capsys.readouterr().out
    assert "1 request, 0 rejected, 10 steps, 9 tokens decoded" in text
    assert "hit rate  unknown: the trace has no hash ids\n" in text
    assert "hit rate unknown" in plots.trace_replay(result).get_suptitle()
    assert main(["trace", str(path), "--cache-only"]) == 2
    assert "counts hash ids that come again, and a.csv has none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "words"),
    [("a.xyz", "--plot must end in .png or .pdf or .svg; got"),
     ("no/a.png", "--plot must name a file in a folder that exists; got")],
)  # fmt: skip
def test_a_figure_that_cannot_be_written_is_refused_first(
    short_trace, tmp_path, capsys, monkeypatch, path, words
):
    monkeypatch.setattr(trace_replay, "read_trace", None)
    assert main(["trace", short_trace, "--plot", str(tmp_path / path)]) == 2
    assert words in capsys.readouterr().err


def test_the_kernel_block_sizes_that_divide_are_the_default(short_trace, capsys):
    assert main(["trace", short_trace, "--block-size", "48"]) == 0
    assert re.findall(r"^table (\d+)", capsys.readouterr().out, re.M) == ["16"]
    assert main(["trace", short_trace, "--block-size", "48", "--kernel-block-size", "24", "8"]) == 0
    assert re.findall(r"^table (\d+)", capsys.readouterr().out, re.M) == ["24", "8"]


@pytest.mark.parametrize(
    "option",
    [{"max_batch": 0}, {"step_seconds": 0.0}, {"prefill_tokens_per_second": -1.0},
     {"sample_seconds": float("nan")}, {"at": -2.0}, {"kernel_block_sizes": [5]}],
)  # fmt: skip
def test_replays_that_would_not_end_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=name.removesuffix("s")):
        replay([Request(0.0, 100, 5)], num_blocks=20, progress=False, **option)


def test_memory_is_counted_in_blocks():
    # Llama-3-8B: 2 * 8 * 128 * 2 bytes * 32 layers = 128 KiB a token.
    assert trace_replay.num_blocks_in(2**30, presets["llama-3-8b"], 32, 16) == 512
    assert trace_replay.num_blocks_in(2**30 - 1, presets["llama-3-8b"], 32, 16) == 511


def test_a_long_replay_is_drawn_in_means():
    request = Request(0.0, input_length=100, output_length=1000)
    result = replay([request], num_blocks=100, step_seconds=1.0, sample_seconds=1.0, progress=False)
    figure = plots.trace_replay(result, title="long")
    assert figure.get_suptitle().startswith("long\n100 blocks of 16 tokens: hit rate unknown")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    assert all(len(line.get_xdata()) == 240 for line in lines.values())
    assert lines["longest"].get_ydata()[0] == result.samples["len_max"][:4].max()
    assert lines["median"].get_ydata()[0] == result.samples["len_p50"][:4].mean()
    assert figure.axes[2].yaxis.get_major_formatter()(12_500, None) == "12,500"


def test_a_pool_can_be_drawn():
    pool = ShadowPool(num_blocks=40, block_size=4)
    pool.allocate("a", 10)
    figure = plots.pool_snapshot(pool.snapshot(), columns=16)
    axes = figure.axes[0]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["free: 37", "cached: 0", "used by one: 3", "shared: 0"]
    with pytest.raises(ValueError, match="columns must be at least 1; got 0"):
        plots.pool_snapshot(pool.snapshot(), columns=0)
    assert "40 blocks of 4 tokens" in axes.get_title(loc="left")
    assert (axes.collections[0].get_array() == 2).sum() == 3
    # ... by what the snapshot says of itself
    (name,) = re.findall(r"draw it with ``cupy_decode\.plots\.(\w+)``", Snapshot.__doc__)
    assert getattr(plots, name) is plots.pool_snapshot
