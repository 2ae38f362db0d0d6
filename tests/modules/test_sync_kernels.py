"""SyncBatchNorm on normplug's kernels over two processes, compared with torch in one process."""

import pytest
import torch

import joined_cases
import sync_cases
from accuracy import assert_same_bits
from interpreted import INTERPRETS, NEEDS_SINGLE_MASKS
from joined_cases import CASES, CHANNELS
from sync_cases import Case, ran


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    if not INTERPRETS:
        pytest.skip("numpy is too new for this Triton")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        return ran(joined_cases.process, 2, tmp_path_factory.mktemp("interpreted"))


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    return ran(joined_cases.process, 2, tmp_path_factory.mktemp("two_gpus"), True)


@pytest.fixture(params=["interpreted", pytest.param("two_gpus", marks=pytest.mark.gpu)])
def pair(request):
    """The results of two processes, in the interpreter and on two GPUs."""
    return request.getfixturevalue(request.param)


# An empty joined batch is not counted.
MARKS = {case: NEEDS_SINGLE_MASKS for case in CASES if sum(case.batches) == 0}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES], ids=str
)
def test_two_processes_are_as_close_to_float64_as_torch_on_the_joined_batch(case, pair):
    parts = [result["numbers"][CASES.index(case)] for result in pair]
    for part in parts:
        assert part["node"].endswith("NormBackward")
    sync_cases.assert_joined(case, parts)


def test_kernels_that_exchange_statistics_send_no_message(pair):
    for result in pair:
        assert result["messages"] == ([], [], [])


def test_a_second_derivative_is_refused(pair):
    for result in pair:
        assert "cannot be differentiated again" in result["refuses_a_second_derivative"]


def test_a_process_that_stops_is_named_and_no_wrong_result_is_used(pair):
    y, state, before, seconds, error = pair[0]["stopped"]
    assert y.isnan().all()
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    assert "rank 0 of 2 has waited" in error
    assert "for rank 1 in the forward" in error
    assert f"of a layer of {CHANNELS} channels" in error
    assert seconds < 120  # in the interpreter
    assert error.endswith("than the timeout of the process group.")


def test_a_process_that_is_too_late_does_not_use_what_the_other_made_of_its_absence(pair):
    first, late = (result["later"] for result in pair)
    assert first[0].isnan().all()
    assert late[0].isfinite().all()  # process 0 had sent its statistics before it gave up
    assert "for rank 1 in the forward" in first[2]
    assert late[1].isnan().all()
    assert "for rank 0 in the backward" in late[2]


def test_processes_that_call_different_layers_all_fail(pair):
    for rank, result in enumerate(pair):
        y, error = result["other_layers"]
        assert y.isnan().all()
        assert f"rank {rank} of 2" in error
        assert f"for rank {1 - rank} in the forward of a layer of {CHANNELS - rank}" in error


@pytest.mark.gpu
def test_a_captured_step_computes_the_same_as_an_eager_one(two_gpus):
    for result in two_gpus:
        eager, captured = result["replayed"]
        torch.testing.assert_close(captured, eager, rtol=0, atol=0)


@pytest.mark.gpu
def test_processes_agree_bit_for_bit_after_many_steps_with_late_processes(two_gpus):
    one, other = (result["many_steps"] for result in two_gpus)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert all(state["num_batches_tracked"] > 290 for state in one)


@pytest.mark.gpu
@pytest.mark.parametrize("side", range(joined_cases.SIDES))
def test_layers_in_two_groups_and_on_two_streams_join_the_batches_of_their_calls(side, two_gpus):
    parts = [result["sides"][side] for result in two_gpus]
    assert_same_bits(parts[0][2], parts[1][2])
    layer = torch.nn.BatchNorm2d(64, dtype=torch.float64)
    for step in range(20):
        x = joined_cases.side_batch(step, side).double().requires_grad_()
        y = layer(x)
        y.pow(3).sum().backward()
    ours = [torch.cat([part[i] for part in parts]).double() for i in range(2)]
    torch.testing.assert_close(ours, [y.detach(), x.grad], rtol=1e-3, atol=1e-4)
    for name in ("running_mean", "running_var"):
        expected = layer.state_dict()[name].float()
        torch.testing.assert_close(parts[0][2][name], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_losses_under_data_parallel_are_those_of_torchs_layers(two_gpus):
    for result in two_gpus:
        ours, theirs = result["data_parallel"]
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_an_exchange_takes_at_most_ten_microseconds(two_gpus):
    joined, alone = two_gpus[0]["exchange_us"]
    assert joined - alone < 10


@pytest.mark.gpu
def test_a_compiled_layer_is_one_graph_and_computes_the_same(two_gpus):
    for result in two_gpus:
        ours, eager = result["compiled"]
        del ours["node"], eager["node"]
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_a_joined_norm_can_be_recomputed(pair):
    for result in pair:
        y, again = result["recomputed"]
        assert torch.equal(y, again)


def test_one_process_can_measure_alone(pair):
    y, probe, state = pair[0]["measured"]
    sync_cases.assert_measured(Case((5, 3)), y, probe)
    _, nothing, other = pair[1]["measured"]
    assert nothing is None
    assert torch.equal(state["running_var"], other["running_var"])


def test_a_fused_model_computes_the_same_and_runs_each_norm_as_one_call(pair):
    for result in pair:
        (plain, *others), node = result["fused"]
        assert node.endswith("NormBackward")  # with the addition and relu in it
        for other in others:
            for name, value in plain.items():
                torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.gpu
def test_the_host_of_two_gpus_never_waits(two_gpus):
    assert [result["without_waiting"] for result in two_gpus] == [None, None]
