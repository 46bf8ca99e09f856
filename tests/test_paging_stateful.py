"""Random programs against the slow model: hypothesis to find and shrink, a long run to sweep."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.paging_model import PoolModel, random_program

TOKENS = st.lists(st.integers(0, 1), max_size=9) | st.integers(0, 5)


class PoolMachine(RuleBasedStateMachine):
    """Allocate, append, fork, publish, slide, free; checked after every step."""

    live = Bundle("live")

    def __init__(self):
        super().__init__()
        self.names = itertools.count()

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.integers(1, 4),
        seed=st.none() | st.integers(0, 3),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(self, num_blocks, block_size, **options):
        self.model = PoolModel(num_blocks, block_size, **options)

    @rule(target=live, tokens=TOKENS)
    def allocate(self, tokens):
        name = next(self.names)
        if not self.model.allocate(name, tokens):
            self.model.allocate(name, [])
        return name

    @rule(seq_id=live, tokens=TOKENS)
    def append(self, seq_id, tokens):
        self.model.append(seq_id, tokens)

    @rule(target=live, seq_id=live)
    def fork(self, seq_id):
        name = next(self.names)
        self.model.fork(seq_id, name)
        return name

    @rule(seq_id=live, data=st.data())
    def publish(self, seq_id, data):
        self.model.publish(seq_id, data.draw(st.integers(0, len(self.model.content[seq_id]))))

    @rule(seq_id=live, window=st.integers(1, 9))
    def slide(self, seq_id, window):
        self.model.release_outside_window(seq_id, window)

    @rule(seq_id=consumes(live), preempt=st.booleans())
    def free(self, seq_id, preempt):
        self.model.free(seq_id, preempt=preempt)

    @invariant()
    def sound(self):
        if hasattr(self, "model"):
            self.model.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_long_random_program_reaches_everything_and_breaks_nothing():
    done = random_program(20_000, seed=1)
    assert min(done.values()) > 100, done
