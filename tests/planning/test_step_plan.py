"""Plans: never over the budget, never slower with more of it, and the arithmetic worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.hardware.eight_bit import NVIDIA, rate_of
from lora_rocm.planning.step_choice import (
    PlanMemory,
    by_worth,
    choose,
    has_ample_room,
    parts_of,
    plans_of,
    smallest,
    spread,
    table,
)
from lora_rocm.planning.step_plan import (
    GRAPH_BYTES,
    IN_FLIGHT,
    MODES,
    PROOF_BUFFERS,
    ROW_COPIES,
    SLACK_BYTES,
    SLACK_RECOMPUTED,
    SLACK_SHARE,
    SLOTS,
    SUM_BUFFERS,
    WORKSPACE_BYTES,
    Block,
    Footprint,
    MemoryPeak,
    Plan,
    Rates,
    SampleCost,
    StepChoice,
    StepRequirements,
    activation_bytes,
    correction,
    resident_bytes,
    step_seconds,
    unpacked_bytes,
    without_main_memory,
)

MIB = 2**20
RATES = Rates(flops=1e12, moved_bytes=1e11, bus_bytes=1e9, launch_s=1e-5, host_launch_s=1e-5)


def row_of_blocks(kept: list[int], weights: list[int] | None = None, flops: list[float] | None = None) -> Footprint:
    """Blocks one after the other, each with an output of 1 MiB; backward each takes 2 MiB in addition to the kept
    tensors.
    """
    count = len(kept)
    weights, flops = weights or [10 * MIB] * count, flops or [1e9] * count
    moments, blocks, starts, live = [], [], [], 0
    for index in range(count):
        starts.append(live)
        live += kept[index] + MIB
        moments.append(MemoryPeak(index, live + MIB, within=True))
    levels = live
    for index in reversed(range(count)):
        blocks.insert(
            0,
            Block(
                name=f"{index}",
                weight_bytes=weights[index],
                kept_bytes=kept[index],
                start_bytes=starts[index],
                rise_bytes=kept[index] + 2 * MIB,
                passing_bytes=3 * MIB,
                entry_bytes=levels,
                forward=SampleCost(flops[index], 0.0, 3),
            ),
        )
        moments.append(MemoryPeak(index, levels + 2 * MIB))
        levels -= kept[index] + MIB
    return Footprint(
        "64x64",
        64 * 64,
        sum(weights) + 5 * MIB,
        7 * MIB,
        2 * MIB,
        MIB,
        tuple(blocks),
        tuple(moments),
        SampleCost(3 * sum(flops), 1e6, 99),
    )


def test_by_hand() -> None:
    net = row_of_blocks([10 * MIB, 20 * MIB, 30 * MIB])
    assert activation_bytes(net, ()) == (60 + 3 + 2) * MIB
    # the first does not keep its 10: missing until its own backward pass
    assert activation_bytes(net, (0,)) == (65 - 10) * MIB
    # the last is recomputed while everything before it is in memory, so only its own forward transients are saved
    assert activation_bytes(net, (2,)) == max(65, 63 - 30 + 32) * MIB
    assert activation_bytes(net, (0, 1, 2)) == (65 - 30) * MIB
    # its forward peak counts 3, not the kept tensors
    assert activation_bytes(replace(net, moments=net.moments[:3]), (2,)) == max(31 + 2, 32 + 3, 63 - 30 + 32) * MIB
    assert resident_bytes(net, ()) == (35 + 7) * MIB + WORKSPACE_BYTES
    assert resident_bytes(net, (0, 2)) == (35 - 20 + SLOTS * 10 + 7) * MIB + WORKSPACE_BYTES
    assert resident_bytes(net, (1,)) == resident_bytes(net, ())  # the place that it comes to is as large


@pytest.mark.parametrize("count", range(1, 7))
def test_moved_inputs_by_hand(count: int) -> None:
    """Each block has an input of 1 MiB. The peak is in the last block, which may count one input too many, then after
    all blocks, also with a first block that keeps its activations.
    """
    every = range(count)
    net = with_more(row_of_blocks([10 * MIB] * count), input_bytes=[MIB] * count)
    stay, slots = min(count, IN_FLIGHT), min(SLOTS, max(0, count - IN_FLIGHT))
    wanted = activation_bytes(net, every) + (slots + stay - count) * MIB
    assert wanted <= activation_bytes(net, every, (), (), True) <= wanted + MIB
    after = replace(net, moments=(*net.moments, MemoryPeak(count, 1000 * MIB)))
    apart = activation_bytes(after, every)
    assert activation_bytes(after, every, (), (), True) == apart + (slots + stay - count) * MIB
    some = activation_bytes(after, every[1:])
    moved, slots = count - 1, min(SLOTS, max(0, count - 1 - IN_FLIGHT))
    assert activation_bytes(after, every[1:], (), (), True) == some + (slots + min(moved, IN_FLIGHT) - moved) * MIB


def test_time_by_hand() -> None:
    net = row_of_blocks([MIB, MIB], flops=[1e9, 2e9])
    job = StepRequirements(batch_size=4, accumulation=3)
    (keep,) = plans_of("keep", 2, net, job, RATES)
    assert keep.rows == 2
    assert keep.step_s == pytest.approx(3 * (4 * (9e9 / 1e12 + 1e6 / 1e11) + 2 * 99 * 1e-5))
    (again,) = plans_of("recompute", 2, net, job, RATES)
    assert again.step_s - keep.step_s == pytest.approx(3 * (4 * 3e9 / 1e12 + 2 * 6 * 1e-5))
    *_, waiting = plans_of("offload", 2, net, job, replace(RATES, bus_bytes=1e6))
    assert waiting.step_s == pytest.approx(3 * 2 * 2 * 20 * MIB / 1e6)  # the bus is what takes longest


def with_more(net: Footprint, **each: list[int]) -> Footprint:
    """The blocks with these attention_bytes, input_bytes or dense_bytes; attention takes a tenth of each forward."""
    tenth = lambda cost: SampleCost(cost.flops / 10, 0.0, 0)  # noqa: E731
    changed = [
        replace(block, attention=tenth(block.forward), **{name: values[index] for name, values in each.items()})
        for index, block in enumerate(net.blocks)
    ]
    return replace(net, blocks=tuple(changed))


def test_kept_attention_and_moved_inputs_by_hand() -> None:
    net = with_more(
        row_of_blocks([10 * MIB, 20 * MIB, 30 * MIB]),
        attention_bytes=[MIB, 2 * MIB, 3 * MIB],
        input_bytes=[0, MIB, MIB],
    )
    every = (0, 1, 2)
    plain = activation_bytes(net, every)
    assert activation_bytes(net, every, (), every) == plain + (1 + 2) * MIB, "of the blocks before the last"
    assert activation_bytes(net, every, (), (), True) == plain, "the last two inputs never leave"
    assert activation_bytes(net, (), (), (), True) == activation_bytes(net, ()), "only those of recomputed blocks move"
    packed = with_more(net, dense_bytes=[MIB, 7 * MIB, 2 * MIB])
    assert unpacked_bytes(packed, StepChoice(every, unpacks_once=True)) == 7 * MIB
    assert unpacked_bytes(packed, StepChoice((0, 2), unpacks_once=True)) == 2 * MIB
    assert unpacked_bytes(packed, StepChoice(every)) == 0


def test_the_time_of_what_is_given_up_by_hand() -> None:
    net = with_more(row_of_blocks([MIB, MIB], flops=[1e9, 2e9]), attention_bytes=[1, 1], input_bytes=[MIB, MIB])
    job, every = StepRequirements(graphs=True), (0, 1)

    def taken(choice: StepChoice, rates: Rates = RATES) -> float:
        return step_seconds(1, choice, net, job, rates)

    again = taken(StepChoice(every))
    assert again - taken(StepChoice(every, attention=every)) == pytest.approx(0.3e9 / 1e12)
    assert taken(StepChoice(every, offloads_inputs=True)) - again == pytest.approx(2 * 2 * MIB / RATES.moved_bytes)
    slow = replace(RATES, bus_bytes=1e6, back_bytes=2e6)  # each direction takes longer than its pass
    assert taken(StepChoice(every, offloads_inputs=True), slow) == pytest.approx(2 * MIB / 1e6 + 2 * MIB / 2e6)
    packed = replace(net, blocks=tuple(replace(block, dense_bytes=4, unpacking_bytes=10**6) for block in net.blocks))
    once, twice = (step_seconds(1, StepChoice(every, unpacks_once=way), packed, job, RATES) for way in (True, False))
    assert twice - once == pytest.approx(2 * 10**6 / RATES.moved_bytes)
    four = StepRequirements(batch_size=4, graphs=True)
    for parts in (1, 2, 4):  # the counted work unpacks for each sample, but the samples of a part share a weight
        less = step_seconds(parts, StepChoice(every), net, four, RATES)
        less -= step_seconds(parts, StepChoice(every), packed, four, RATES)
        assert less == pytest.approx((4 - parts) * 3 * 2 * 10**6 / RATES.moved_bytes)
    fast = replace(RATES, bus_bytes=1e15)
    checked = taken(StepChoice(every, every), fast) - taken(StepChoice(every), fast)
    assert checked == pytest.approx(2 * 20 * MIB / RATES.moved_bytes), "the fingerprints of fetched weights"


def test_memory_that_samples_share_is_counted_once() -> None:
    """Dense weights, and logits that are computed in pieces of a fixed size."""
    net = row_of_blocks([10 * MIB, 20 * MIB, 30 * MIB])
    blocks = tuple(replace(block, again_shared_bytes=MIB, passing_shared_bytes=MIB) for block in net.blocks)
    moments = tuple(replace(moment, shared_bytes=2 * MIB) for moment in net.moments)
    shared = replace(net, blocks=blocks, moments=moments)
    for chosen, less in (((), 2), ((2,), 1)):
        assert activation_bytes(shared, chosen) == activation_bytes(net, chosen)
        assert activation_bytes(shared, chosen, rows=3) == 3 * activation_bytes(net, chosen) - 2 * less * MIB
    whole = replace(net, recomputed_bytes=9 * MIB, recomputed_shared_bytes=4 * MIB)
    assert activation_bytes(whole, (0, 1, 2), rows=3) == (3 * 9 - 2 * 4) * MIB
    assert Footprint.from_json(json.loads(json.dumps(shared.to_json()))) == shared


def test_attention_is_kept_until_it_is_worth_more_than_another_block() -> None:
    """A block first gives up what costs least per byte; where that is attention itself, all of it at once."""
    net = with_more(row_of_blocks([10 * MIB, 10 * MIB], flops=[1e9, 4e9]), attention_bytes=[MIB // 2, MIB // 2])
    found = [plan.choice for plan in plans_of("selective", 1, net, StepRequirements(), RATES)]
    assert [(choice.recomputed, choice.attention) for choice in found] == [((0,), (0,)), ((0,), ()), ((0, 1), (1,))]
    cheap = with_more(row_of_blocks([10 * MIB, 10 * MIB], flops=[1e9, 4e9]), attention_bytes=[9 * MIB, 9 * MIB])
    assert [plan.attention for plan in plans_of("selective", 1, cheap, StepRequirements(), RATES)] == [()]
    never = StepRequirements(keeps_attention=False)
    assert all(not plan.attention for mode in MODES for plan in plans_of(mode, 1, net, never, RATES))


def test_one_memory_of_plans_answers_for_several_cards() -> None:
    net = with_more(
        row_of_blocks([10 * MIB] * 6), attention_bytes=[MIB] * 6, input_bytes=[MIB] * 6, dense_bytes=[MIB] * 6
    )
    job = StepRequirements(batch_size=4)
    least, memory = smallest(net, job, RATES), PlanMemory(net, job, RATES)
    budgets = [None, *(least.needed_bytes + more * 8 * MIB for more in (-1, 6, 0, 30, 1, 12, 3))]
    found = [memory.choose(budget) for budget in budgets]
    assert found == [choose(budget, net, job, RATES) for budget in budgets]
    assert memory.smallest() == least and len({plan and plan.needed_bytes for plan in found}) > 3


def test_what_is_not_allowed_is_not_chosen() -> None:
    net = with_more(
        row_of_blocks([10 * MIB] * 3), attention_bytes=[MIB] * 3, input_bytes=[MIB] * 3, dense_bytes=[MIB] * 3
    )
    plans = [plan for mode in MODES for plan in plans_of(mode, 1, net, StepRequirements(), RATES)]
    assert {plan.mode for plan in plans if plan.offloads_inputs} == {"selective", "inputs", "offload"}
    assert {plan.mode for plan in plans if plan.unpacks_once} == {*MODES} - {"keep"}
    shared = StepRequirements(modes=without_main_memory(MODES), unpacks_once=False)
    found = [plan for mode in shared.modes for plan in plans_of(mode, 1, net, shared, RATES)]
    assert not any(plan.offloads_inputs or plan.offloaded or plan.unpacks_once for plan in found)


def test_inputs_go_before_weights_where_the_bus_would_hold_the_step_up() -> None:
    """As a language model of many blocks: inputs are small, weights are not."""
    net = with_more(
        row_of_blocks([40 * MIB] * 12, weights=[200 * MIB] * 12, flops=[2e10] * 12), input_bytes=[0, *[MIB] * 11]
    )
    job = StepRequirements(graphs=False)
    here = smallest(net, replace(job, modes=("keep", "selective", "recompute")), RATES).needed_bytes
    moved = next(plans_of("inputs", 1, net, job, RATES)).needed_bytes
    assert moved < here
    found = choose(here - 1, net, job, RATES)
    assert found is not None and not found.offloaded and found.offloads_inputs
    alone = replace(job, modes=("keep", "selective", "recompute", "offload"))
    assert (other := choose(here - 1, net, alone, RATES)) is not None
    assert other.offloaded and other.step_s > found.step_s, "the control"


def test_what_comes_and_goes_needs_more_than_its_bytes() -> None:
    """The more is recomputed, the more the allocator holds in addition to the tensors, and so for each sample."""
    net = row_of_blocks([10 * MIB, 10 * MIB, 10 * MIB], flops=[1e9, 1e9, 1e9])
    beside = {
        (rows, len(plan.recomputed)): plan.needed_bytes - plan.peak_bytes - SLACK_BYTES
        for rows in (1, 4)
        for mode in ("selective", "recompute")
        for plan in plans_of(mode, 1, net, StepRequirements(batch_size=rows), RATES)
    }
    passing = SLACK_RECOMPUTED * activation_bytes(net, (0, 1, 2))
    together = replace(net, recomputed_bytes=MIB)  # true only if all are recomputed, and none is offloaded
    *_, some, every = (
        plan for mode in ("selective", "recompute") for plan in plans_of(mode, 1, together, StepRequirements(), RATES)
    )
    assert some.needed_bytes - some.peak_bytes == SLACK_BYTES + beside[1, len(some.recomputed)]
    assert every.needed_bytes - every.peak_bytes - SLACK_BYTES == int((SLACK_SHARE + SLACK_RECOMPUTED) * MIB)
    for (rows, count), found in beside.items():
        own = SLACK_SHARE * rows * activation_bytes(net, by_worth(net, RATES)[:count])
        assert found == pytest.approx(own + rows * passing * count / 3, abs=2)


def test_selective_recomputes_first_what_is_worth_most() -> None:
    net = row_of_blocks([10 * MIB, 10 * MIB, 0, MIB], flops=[4e9, 1e9, 1e6, 1e9])
    variants = [plan.recomputed for plan in plans_of("selective", 1, net, StepRequirements(), RATES)]
    assert variants == [(1,), (0, 1)]  # all three would be recompute; the third keeps nothing


blocks = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 80), st.integers(1, 10**6)), min_size=1, max_size=8)
jobs = st.builds(
    StepRequirements,
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    graphs=st.booleans(),
    shapes=st.integers(1, 3),
    correction=st.floats(0.5, 2.0),
)
budgets = st.integers(0, 6000)


def footprint_of(drawn: list[tuple[int, int, int]]) -> Footprint:
    kept, weights, flops = zip(*drawn, strict=True)
    return row_of_blocks([k * MIB for k in kept], [w * MIB for w in weights], [f * 1e6 for f in flops])


@given(blocks, jobs, budgets, budgets)
def test_more_memory_is_never_slower_and_no_plan_is_over_the_budget(
    drawn: list[tuple[int, int, int]], job: StepRequirements, one: int, other: int
) -> None:
    net = footprint_of(drawn)
    less, more = sorted((one * MIB, other * MIB))
    small, large, free = (choose(budget, net, job, RATES) for budget in (less, more, None))
    assert free is not None
    for budget, plan in ((less, small), (more, large)):
        assert plan is None or plan.needed_bytes <= budget
    if small is not None:
        assert large is not None and large.step_s <= small.step_s
    if large is not None:
        assert free.step_s <= large.step_s


@given(blocks, jobs, budgets, st.builds(Rates, *(st.floats(1e9, 1e15) for _ in range(5)), st.floats(0, 1e-3)))
def test_with_ample_room_everything_is_kept_at_any_rates(
    drawn: list[tuple[int, int, int]], job: StepRequirements, budget: int, rates: Rates
) -> None:
    net = footprint_of(drawn)
    if has_ample_room(budget * MIB, net, job):
        fastest = choose(budget * MIB, net, job, rates)
        kept = next(plans_of("keep", job.min_parts, net, job, rates))
        assert fastest is not None and kept.step_s == fastest.step_s and kept.graphs == job.graphs
        assert kept.needed_bytes <= budget * MIB / 2


def test_room_is_ample_up_to_half_of_the_budget() -> None:
    net, job = row_of_blocks([10 * MIB, 20 * MIB]), StepRequirements()
    needed = next(plans_of("keep", 1, net, job, RATES)).needed_bytes
    assert has_ample_room(2 * needed, net, job) and not has_ample_room(2 * needed - 2, net, job)
    assert not has_ample_room(2**50, net, replace(job, modes=("recompute",)))


@given(blocks, jobs, budgets)
def test_where_none_is_chosen_even_the_smallest_does_not_fit(
    drawn: list[tuple[int, int, int]], job: StepRequirements, budget: int
) -> None:
    net = footprint_of(drawn)
    least = smallest(net, job, RATES)
    chosen = choose(budget * MIB, net, job, RATES)
    assert (chosen is None) == (least.needed_bytes > budget * MIB)
    assert all(plan.needed_bytes >= least.needed_bytes for plan in table(None, net, job, RATES))


@given(blocks, jobs)
def test_the_effective_batch_stays_whole(drawn: list[tuple[int, int, int]], job: StepRequirements) -> None:
    for plan in table(None, footprint_of(drawn), job, RATES):
        assert plan.rows * plan.parts >= job.batch_size > plan.rows * (plan.parts - 1) - plan.parts
        assert 1 <= plan.parts <= job.batch_size


@given(st.integers(1, 64), st.integers(1, 64))
def test_parts_go_up_to_single_samples_and_never_below_what_was_needed(batch_size: int, needed: int) -> None:
    found = parts_of(StepRequirements(batch_size, min_parts=min(needed, batch_size)))
    assert found[0] == min(needed, batch_size) and found[-1] == batch_size
    assert found == sorted(set(found))


@given(st.integers(1, 100))
def test_offloaded_blocks_are_spread_and_more_include_fewer(total: int) -> None:
    sets = [set(spread(count, total)) for count in range(1, total + 1)]
    assert all(len(found) == count for count, found in enumerate(sets, 1))
    assert all(few < many for few, many in zip(sets, sets[1:], strict=False))
    half = sorted(sets[max(0, total // 2 - 1)])
    assert all(later - earlier <= 4 for earlier, later in zip(half, half[1:], strict=False))


@given(blocks, jobs)
def test_a_measured_peak_gives_the_correction_that_made_it(
    drawn: list[tuple[int, int, int]], job: StepRequirements
) -> None:
    net = footprint_of(drawn)
    plan = next(plans_of("keep", 1, net, replace(job, graphs=False), RATES))
    gathering = resident_bytes(net, ()) + net.gradient_bytes + net.landing_bytes
    wanted = job.correction if plan.peak_bytes > gathering else 1.25  # then nothing was learnt
    assert correction(plan, plan.peak_bytes, net, 1.25) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("job", "stays"),
    [(StepRequirements(), False), (StepRequirements(accumulation=2), True), (StepRequirements(graphs=True), True)],
)
def test_gradients_lie_beside_activations_only_where_they_stay(job: StepRequirements, stays: bool) -> None:
    net = replace(row_of_blocks([10 * MIB]), adapter_bytes=0)
    plan = next(plans_of("keep", 1, net, job, RATES))
    activations = activation_bytes(net, ())
    assert plan.keeps_gradients is stays
    proof = PROOF_BUFFERS * net.gradient_bytes if job.graphs else 0
    assert plan.peak_bytes - resident_bytes(net, ()) - proof == activations + stays * net.gradient_bytes
    many = replace(net, gradient_bytes=activations, landing_bytes=activations + 5)
    gathering = next(plans_of("keep", 1, many, job, RATES)).peak_bytes - resident_bytes(net, ())
    proof = PROOF_BUFFERS * many.gradient_bytes if job.graphs else 0
    assert gathering - proof == 2 * activations + 5


def test_a_measurement_below_what_lies_there_is_not_believed() -> None:
    net = replace(row_of_blocks([10 * MIB]), gradient_bytes=0, landing_bytes=0)
    assert (
        correction(next(plans_of("keep", 1, net, StepRequirements(), RATES)), resident_bytes(net, ()) + 1, net) == 0.25
    )


def test_graphs_need_more_and_most_where_there_are_several_sizes() -> None:
    net = row_of_blocks([10 * MIB])
    plain, one, several = (
        next(plans_of("keep", 1, net, StepRequirements(graphs=shapes > 0, shapes=shapes), RATES))
        for shapes in (0, 1, 2)
    )
    proof = PROOF_BUFFERS * net.gradient_bytes
    assert one.needed_bytes - plain.needed_bytes == GRAPH_BYTES + proof + net.gradient_bytes
    assert one.peak_bytes - plain.peak_bytes == proof + net.gradient_bytes
    summed = next(plans_of("keep", 1, net, StepRequirements(graphs=True, accumulation=2), RATES))
    assert summed.peak_bytes - one.peak_bytes == SUM_BUFFERS * net.gradient_bytes
    assert several.needed_bytes - one.needed_bytes == activation_bytes(net, ())
    assert (plain.graphs, one.graphs) == (False, True)


def test_nothing_is_captured_where_only_that_makes_it_fit_or_nothing_is_won() -> None:
    net = row_of_blocks([10 * MIB, 10 * MIB])
    host_bound, device_bound = (replace(RATES, host_launch_s=each) for each in (1e-2, 1e-9))
    job = StepRequirements(graphs=True)
    captured, not_captured = (next(plans_of("keep", 1, net, replace(job, graphs=g), RATES)) for g in (True, False))
    roomy = choose(captured.needed_bytes, net, job, host_bound)
    tight = choose(not_captured.needed_bytes, net, job, device_bound)
    assert roomy is not None and roomy.graphs and roomy.mode == "keep"
    assert tight is not None and not tight.graphs and tight.mode == "keep"
    assert not_captured.step_s == pytest.approx(max(_device_s(net), net.work.launches * RATES.host_launch_s))


def _device_s(net: Footprint) -> float:
    return next(plans_of("keep", 1, net, StepRequirements(graphs=True), RATES)).step_s


def test_offloading_everything_means_everything() -> None:
    net = row_of_blocks([MIB] * 5)
    (only,) = plans_of("offload", 1, net, StepRequirements(all_offloaded=True), RATES)
    assert only.offloaded == only.recomputed == (0, 1, 2, 3, 4)


@given(blocks)
def test_a_footprint_survives_json(drawn: list[tuple[int, int, int]]) -> None:
    net = footprint_of(drawn)
    assert Footprint.from_json(json.loads(json.dumps(net.to_json()))) == net


def test_another_cost_scales_what_depends_on_samples_and_nothing_else() -> None:
    net = row_of_blocks([10 * MIB, 20 * MIB])
    quarter = net.scaled(0.25)
    assert activation_bytes(quarter, ()) == activation_bytes(net, ()) // 4
    assert resident_bytes(quarter, ()) == resident_bytes(net, ())
    assert quarter.work.flops == net.work.flops / 4 and quarter.work.launches == net.work.launches


def test_every_mode_has_a_plan_that_says_so() -> None:
    plans: list[Plan] = table(None, row_of_blocks([MIB, MIB, MIB]), StepRequirements(2), RATES)
    assert [(plan.mode, plan.parts) for plan in plans] == [(mode, parts) for parts in (1, 2) for mode in MODES]


def test_the_token_embedding_moves_only_where_that_lets_a_faster_plan_fit() -> None:
    net = replace(row_of_blocks([20 * MIB] * 3), table_bytes=5 * MIB, row_bytes=MIB // 4)
    job = StepRequirements(looks_up_rows=True)
    free = choose(None, net, job, RATES)
    assert free is not None and not free.looks_up_rows
    tight = choose(free.needed_bytes - MIB, net, job, RATES)
    assert tight is not None and tight.looks_up_rows and tight.mode == free.mode
    assert free.peak_bytes - tight.peak_bytes == 5 * MIB - ROW_COPIES * MIB // 4
    assert tight.step_s - free.step_s == pytest.approx(MIB / 4 / RATES.bus_bytes)
    for other, requirements in ((net, StepRequirements()), (replace(net, table_bytes=0), job)):
        without = choose(free.needed_bytes - MIB, other, requirements, RATES)
        assert without is None or (not without.looks_up_rows and without.step_s > tight.step_s)


FLUX = {
    "bf16": (
        SampleCost(1.1925758e14, 6.00403e11, 11804, 5.2053393e13),
        SampleCost(5.9668181e13, 1.773e11, 3763, 1.4872398e13),
    ),
    "fp8": (
        SampleCost(5.3931776e11, 6.40051e11, 13754, 5.2053393e13, 1.1871826e14),
        SampleCost(1.7858927e11, 1.81159e11, 4181, 1.4872398e13, 5.9489592e13),
    ),
}
"""Work of a step of FLUX.1 stored in fp8, and of all its blocks, by ``model.compute``; counted for a sample of 1024 px
and a LoRA of rank 16 on attention (``test_footprint.test_flux_costs_what_plans_of_fp8_are_tested_with``).
"""
H200 = Rates(flops=6.9e14, moved_bytes=4.2e12, attention_flops=5.5e14, known=True)


def flux_seconds(compute: str, times: float) -> float:
    """The time of a captured step of FLUX.1 with all blocks recomputed, on an H200."""
    work, forward = FLUX[compute]
    block = Block("all", 0, 0, 0, 0, 0, 0, forward)
    found = Footprint("1024x1024", 1024 * 1024, 0, 0, 0, 0, (block,), (), work)
    rates = replace(H200, eight_bit_flops=H200.flops * times)
    return step_seconds(1, StepChoice((0,)), found, StepRequirements(graphs=True), rates)


def test_products_in_eight_bits_are_counted_at_their_rate() -> None:
    """A step of FLUX.1 took 472.1 ms with bf16 products and 371.1 with fp8 products (docs/lab/performance.md)."""
    times = rate_of(NVIDIA, "fp8").times
    saved_s = flux_seconds("bf16", times) - flux_seconds("fp8", times)
    assert saved_s == pytest.approx(0.4721 - 0.3711, rel=0.1)
    assert flux_seconds("fp8", 1.0) > flux_seconds("bf16", 1.0), "the control: scaling takes time, too"
