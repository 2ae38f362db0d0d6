"""The mutations of `mutate.py`: small faults that the tests must notice.

A new one needs a text that its file has exactly once, and the tests nearest to it. Name single
tests, so that the whole list takes minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# The kernels run in Triton's interpreter, and calls in Python.
INTERPRETER = {"TRITON_INTERPRET": "1", "NORMPLUG_NATIVE": "0"}
# The host path in C++ is compiled, and calls run through it.
IN_CPP = {"TRITON_INTERPRET": "1", "NORMPLUG_NATIVE": "1"}

ARGUMENTS = "tests/functional/test_arguments.py"
BESIDE = "tests/fuse/test_beside.py"
BATCH_NORM_KERNELS = "tests/interpreted/test_batch_norm_kernels.py"
BUFFERS = "tests/statistics/test_buffers.py"
BUILDING = "tests/native/test_building.py"
CALLS = "tests/interpreted/test_calls.py"
CHANGES = "tests/fuse/test_changes.py"
CHECK = "tests/swap/test_check.py"
CONVOLUTIONS = "tests/interpreted/test_convolutions.py"
COMPARE = "tests/tools/test_compare.py"
CLASSES = "tests/fuse/test_classes.py"
DOCTOR = "tests/statistics/test_doctor.py"
EDITED = "tests/fuse/test_edited.py"
EVERY_NORM = "tests/functional/test_every_norm.py"
FOLD = "tests/swap/test_fold.py"
FREEZING = "tests/statistics/test_freezing.py"
FROZEN_AND_TOOLS = "tests/statistics/test_frozen_and_tools.py"
GATED = "tests/swap/test_gated_norms.py"
GROUPS = "tests/statistics/test_groups.py"
HANDWRITTEN = "tests/swap/test_handwritten.py"
HOST_PATH = "tests/interpreted/test_host_path.py"
GROUP_NORM_KERNELS = "tests/interpreted/test_group_norm_kernels.py"
PAIR_KERNELS = "tests/interpreted/test_pair_kernels.py"
LAYER_NORM = "tests/functional/test_layer_norm.py"
LAYER_NORM_KERNELS = "tests/interpreted/test_layer_norm_kernels.py"
RUN = "tests/tools/test_run.py"
MODULATED_KERNELS = "tests/interpreted/test_modulated_kernels.py"
MODULATION = "tests/fuse/test_modulation.py"
RECOMPUTE = "tests/interpreted/test_recompute.py"
SAFE = "tests/statistics/test_safe.py"
SHORTCUTS = "tests/fuse/test_shortcuts.py"
SITES = "tests/fuse/test_sites.py"
SOURCE = "tests/fuse/test_source.py"
SYNC = "tests/modules/test_sync.py"
SPEED = "tests/tools/test_speed.py"
TRAIN = "tests/tools/test_train.py"


class Mutation(NamedTuple):
    """A fault, and the tests that should notice it.

    Attributes:
        name: what the fault is.
        file: the path of the file, from the checkout.
        old: a text that the file has exactly once.
        new: the text that replaces it.
        tests: paths or node ids of the tests nearest to it.
        environment: environment variables of the tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    environment: Mapping[str, str] = {}


def tests_of(path: str, *names: str) -> tuple[str, ...]:
    """The node ids of tests in a file."""
    return tuple(f"{path}::{name}" for name in names)


JOINED_SHORTCUT = tests_of(
    "tests/modules/test_sync_kernels.py",
    "test_in_each_of_two_processes[interpreted-"
    "a_shortcuts_norm_is_joined_in_the_call_that_adds_it]",
)
MUTATIONS = (
    # Kernels.
    Mutation(
        "columns: no shift by the first row",
        "normplug/_kernels/batch_norm/columns.py",
        "top = load_row(x_ptr, area, start, T).to(ACC)",
        "top = load_row(x_ptr, area, start, T).to(ACC) * 0.0",
        tests_of(
            BATCH_NORM_KERNELS, "test_a_variance_does_not_round_at_the_size_of_the_mean"
        ),
        INTERPRETER,
    ),
    Mutation(
        "columns: no correction of the average",
        "normplug/_kernels/batch_norm/columns.py",
        "average += tl.sum(tl.where(own, mean[None, :] - average[:, None], 0.0), axis=1)",
        "average += tl.sum(tl.where(own, 0.0, 0.0), axis=1)",
        tests_of(BATCH_NORM_KERNELS, "test_the_mean_of_a_small_plane_is_rounded_once"),
        INTERPRETER,
    ),
    Mutation(
        "columns: running variance over n",
        "normplug/_kernels/batch_norm/columns.py",
        "update_running(running_var_ptr + channels, old_var, m2 / (n - 1.0), step, updated)",
        "update_running(running_var_ptr + channels, old_var, m2 / n, step, updated)",
        tests_of(BATCH_NORM_KERNELS, "test_every_setup_is_as_close_to_float64_as_torch"),
        INTERPRETER,
    ),
    Mutation(
        "columns: the slope of a residual's norm lacks an rstd",
        "normplug/_kernels/batch_norm/columns.py",
        "c * rstd * rstd / n",
        "c * rstd / n",
        tests_of(PAIR_KERNELS, "test_every_setup_is_as_close_to_float64_as_torch"),
        INTERPRETER,
    ),
    Mutation(
        "columns: a kernel writes over dy where no dx is wanted",
        "normplug/_kernels/batch_norm/columns.py",
        "    if F.dx:\n        dx = dz",
        "    if True:\n        dx = dz",
        tests_of(PAIR_KERNELS, "test_a_subset_of_the_gradients_can_be_requested"),
        INTERPRETER,
    ),
    Mutation(
        "planes: the bias of a residual's norm is left out",
        "normplug/_kernels/batch_norm/planes.py",
        "residual = (residual - other_mean) * other_scale + other_bias",
        "residual = (residual - other_mean) * other_scale",
        tests_of(PAIR_KERNELS, "test_every_setup_is_as_close_to_float64_as_torch"),
        INTERPRETER,
    ),
    Mutation(
        "batch_norm: the gradient of a residual's weight lacks the mode",
        "normplug/_ops/batch_norm.py",
        "dweight = gain if ctx.root == 1.0 else gain * ctx.root",
        "dweight = gain",
        tests_of(SHORTCUTS, "test_both_norms_are_one_call_where_that_is_safe"),
    ),
    Mutation(
        "fuse: a shortcut's norm runs after its input has changed",
        "normplug/_fuse/sites.py",
        "if not _may_run_late(traced, node, site.add, []):",
        "if False:",
        tests_of(
            SHORTCUTS,
            "test_a_norm_whose_input_changes_before_the_addition_runs_at_its_own_place",
        ),
    ),
    Mutation(
        "fuse: a frozen shortcut's norm takes the batch's statistics",
        "normplug/modules/batch_norm.py",
        'if not by_batch or not can_run.has_kernels("fuse", self.backend, x):',
        'if not can_run.has_kernels("fuse", self.backend, x):',
        tests_of(SHORTCUTS, "test_a_norm_with_a_hook_or_frozen_statistics_runs_apart"),
    ),
    Mutation(
        "joined shortcut: its slope is of this process's batch",
        "normplug/_kernels/batch_norm/columns.py",
        "a, b, c = joined_sums(",
        "a, b, own = joined_sums(",
        JOINED_SHORTCUT,
        INTERPRETER,
    ),
    Mutation(
        "joined shortcut: the bias's gradient is doubled",
        "normplug/_kernels/batch_norm/planes.py",
        "                        store_dstats(a, c, channel,",
        "                        store_dstats(2 * a, c, channel,",
        JOINED_SHORTCUT,
        INTERPRETER,
    ),
    Mutation(
        "columns: every channel counts the batch",
        "normplug/_kernels/batch_norm/columns.py",
        "counted = counted * tl.max(tl.where((places == 0) & finite, 1, 0), axis=0)",
        "counted = counted * tl.max(tl.where(finite, 1, 0), axis=0)",
        ("tests/interpreted/test_safe_kernels.py",),
        INTERPRETER,
    ),
    Mutation(
        "gate first: its gradient lacks the derivative of silu",
        "normplug/_kernels/layer_norm/rows.py",
        "dh_dgate = h * silu_slope",
        "dh_dgate = h * silu",
        tests_of(MODULATED_KERNELS, "test_every_kind_is_as_close_to_float64_as_torch"),
        INTERPRETER,
    ),
    Mutation(
        "sets: a program takes rows of the next set",
        "normplug/_kernels/layer_norm/rows.py",
        "return number * INNER + members",
        "return number * members + INNER",
        tests_of(MODULATED_KERNELS, "test_every_kind_is_as_close_to_float64_as_torch"),
        INTERPRETER,
    ),
    Mutation(
        "sets: all add up the parts of the first",
        "normplug/_kernels/layer_norm/rows.py",
        "parts_ptr += place * groups * SUMS",
        "parts_ptr += place * 0",
        tests_of(MODULATED_KERNELS, "test_sets_of_rows_may_be_cut_in_any_way"),
        INTERPRETER,
    ),
    Mutation(
        "gate last: no rounding before it",
        "normplug/_kernels/layer_norm/rows.py",
        "y = as_dtype(y, F.gated).to(ACC) * activate(gate, SILU)",
        "y = y * activate(gate, SILU)",
        tests_of(MODULATED_KERNELS, "test_a_gated_norm_rounds_where_its_library_does"),
        INTERPRETER,
    ),
    Mutation(
        "adaptive: scales of samples are sharded with x",
        "normplug/_ops/row_norms.py",
        "return tuple(dim for dim in rows if sizes[dim] == 1)",
        "return tuple(rows)",
        ("tests/modules/test_sharded.py",),
    ),
    Mutation(
        "planes: no shift by the first value",
        "normplug/_kernels/batch_norm/planes.py",
        "first = tl.load(x_ptr + first).to(ACC)",
        "first = tl.load(x_ptr + first).to(ACC) * 0.0",
        tests_of(
            BATCH_NORM_KERNELS, "test_a_variance_does_not_round_at_the_size_of_the_mean"
        ),
        INTERPRETER,
    ),
    Mutation(
        "planes: dx without the mean of dz",
        "normplug/_kernels/batch_norm/planes.py",
        "dx = (dz - mean_dz - centred * slope) * scale",
        "dx = (dz - centred * slope) * scale",
        tests_of(BATCH_NORM_KERNELS, "test_every_setup_is_as_close_to_float64_as_torch"),
        INTERPRETER,
    ),
    Mutation(
        "merging: no shift by the first tile's mean",
        "normplug/_kernels/merging.py",
        'first = tl.load(partial_ptr, cache_modifier=".cg")',
        'first = tl.load(partial_ptr, cache_modifier=".cg") * 0.0',
        tests_of(
            BATCH_NORM_KERNELS, "test_a_variance_does_not_round_at_the_size_of_the_mean"
        ),
        INTERPRETER,
    ),
    Mutation(
        "merging: no shift by the first part's mean",
        "normplug/_kernels/merging.py",
        'first = tl.load(partial_ptr + places, cache_modifier=".cg")',
        'first = tl.load(partial_ptr + places, cache_modifier=".cg") * 0.0',
        tests_of(
            BATCH_NORM_KERNELS, "test_a_variance_does_not_round_at_the_size_of_the_mean"
        ),
        INTERPRETER,
    ),
    Mutation(
        "merging: the second level counts single items",
        "normplug/_kernels/merging.py",
        "each = ROWS_EACH * FAN_IN * HW",
        "each = ROWS_EACH * HW",
        tests_of(
            BATCH_NORM_KERNELS, "test_more_parts_than_one_merge_takes_are_merged_right"
        ),
        INTERPRETER,
    ),
    Mutation(
        "tiles: means of lanes without their counts",
        "normplug/_kernels/tiles.py",
        "column_mean = tl.sum(mean * counts, axis=0) / rows",
        "column_mean = tl.sum(mean, axis=0) / mean.shape[0]",
        tests_of(BATCH_NORM_KERNELS, "test_channel_stats_are_accurate"),
        INTERPRETER,
    ),
    Mutation(
        "primitives: float64 to float16 in one step",
        "normplug/_kernels/primitives.py",
        "        if DTYPE == tl.float16:\n            value = value.to(tl.float32)\n        elif",
        "        if",
        tests_of(
            LAYER_NORM_KERNELS,
            "test_a_float64_result_is_rounded_to_float32_before_float16",
        ),
        INTERPRETER,
    ),
    Mutation(
        "activation: relu passes a gradient at 0",
        "normplug/_kernels/activation.py",
        "return tl.where(z <= 0, 0.0, dy)",
        "return tl.where(z < 0, 0.0, dy)",
        tests_of(BATCH_NORM_KERNELS, "test_relu_passes_no_gradient_at_zero"),
        INTERPRETER,
    ),
    Mutation(
        "activation: the mask has a bit at 0",
        "normplug/_kernels/activation.py",
        "tl.reshape(tl.where(z <= 0, 0, 1).to(tl.int32), [COUNT // 8, 8])",
        "tl.reshape(tl.where(z < 0, 0, 1).to(tl.int32), [COUNT // 8, 8])",
        tests_of(BATCH_NORM_KERNELS, "test_relu_passes_no_gradient_at_zero"),
        INTERPRETER,
    ),
    Mutation(
        "GroupNorm: no maximum of m2 and 0",
        "normplug/_kernels/group_norm/columns.py",
        "m2 = tl.maximum(b - a * mean, 0.0)",
        "m2 = b - a * mean",
        tests_of(GROUP_NORM_KERNELS, "test_rounding_makes_no_variance_negative"),
        INTERPRETER,
    ),
    Mutation(
        "GroupNorm: no shift by the first value",
        "normplug/_kernels/group_norm/planes.py",
        "first = tl.load(x_ptr + groups * WIDTH + k * T.block, mask=inside, other=0.0)",
        "first = tl.zeros([T.r], ACC)",
        tests_of(
            GROUP_NORM_KERNELS, "test_a_variance_does_not_round_at_the_size_of_the_mean"
        ),
        INTERPRETER,
    ),
    Mutation(
        "GroupNorm: no shift of groups that are read twice",
        "normplug/_kernels/group_norm/planes.py",
        "first = tl.load(x_ptr + start * WIDTH).to(ACC)",
        "first = tl.load(x_ptr + start * WIDTH).to(ACC) * 0.0",
        tests_of(
            GROUP_NORM_KERNELS, "test_a_variance_does_not_round_at_the_size_of_the_mean"
        ),
        INTERPRETER,
    ),
    Mutation(
        "GroupNorm: no shift by the first rows",
        "normplug/_kernels/group_norm/columns.py",
        "mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / T.u)",
        "mean = tl.sum(x, axis=STEP_AXIS) * 0.0",
        tests_of(GROUP_NORM_KERNELS, "test_as_close_to_float64_as_torch"),
        INTERPRETER,
    ),
    Mutation(
        "LayerNorm: no shift by the first value",
        "normplug/_kernels/layer_norm/rows.py",
        "first = tl.load(x_ptr + places, mask=inside, other=0.0).to(ACC)",
        "first = tl.zeros([R], ACC)",
        tests_of(LAYER_NORM_KERNELS, "test_the_mean_of_a_row_is_rounded_once"),
        INTERPRETER,
    ),
    Mutation(
        "schedule: sizes are not divided by their unit",
        "normplug/_kernels/batch_norm/schedule.py",
        '"LIVE_UNITS": self.live // self.unit,',
        '"LIVE_UNITS": self.live,',
        tests_of(BATCH_NORM_KERNELS, "test_channel_stats_are_accurate"),
        INTERPRETER,
    ),
    # Operations.
    Mutation(
        "variance_of: no clamp at 0",
        "normplug/_ops/torch_way.py",
        "return rstd.pow(-2).sub_(eps).clamp_min_(0)",
        "return rstd.pow(-2).sub_(eps)",
        tests_of(LAYER_NORM, "test_the_watched_variance_of_equal_values_is_not_negative"),
    ),
    Mutation(
        "safe: the variance is not copied",
        "normplug/_ops/torch_way.py",
        "new_var = _finite_copy(var)",
        "new_var = var",
        (SAFE,),
    ),
    Mutation(
        "safe: a variance that is not finite counts",
        "normplug/_ops/torch_way.py",
        "finite = torch.isfinite(new_mean) & torch.isfinite(new_var)",
        "finite = torch.isfinite(new_mean)",
        (SAFE,),
    ),
    Mutation(
        "operator: running variance over n",
        "normplug/_ops/batch_norm.py",
        "unbiased = var * (values / (values - 1))\n"
        "            torch_way.update_running(t, self.momentum, stats",
        "unbiased = var\n            torch_way.update_running(t, self.momentum, stats",
        tests_of(CALLS, "test_the_operators_give_the_same_bits_as_eager_calls"),
        INTERPRETER,
    ),
    Mutation(
        "operator: of contiguous images, whose layout Inductor chooses",
        "normplug/_ops/batch_norm.py",
        "suits = not is_image",
        "suits = True",
        tests_of(
            CALLS, "test_a_compiler_gets_no_operator_for_images_that_it_lays_out_itself"
        ),
        INTERPRETER,
    ),
    Mutation(
        "rms eps: of the promoted dtype",
        "normplug/_ops/row_norms.py",
        "eps = self.eps if h.dtype == total.dtype else rms_eps(total.dtype, self.eps)",
        "eps = self.eps",
        tests_of(
            LAYER_NORM,
            "test_the_default_eps_of_an_rms_norm_is_that_of_its_input_beside_a_wider_weight",
        ),
    ),
    Mutation(
        "rms eps in the kernels: of the accumulator's dtype",
        "normplug/_ops/row_norms_plan.py",
        "self._eps = rms_eps(self._total_dtype, spec.eps)",
        "self._eps = rms_eps(self.acc, spec.eps)",
        tests_of(
            LAYER_NORM_KERNELS,
            "test_the_default_eps_of_an_rms_norm_is_that_of_its_input_beside_a_wider_weight",
        ),
        INTERPRETER,
    ),
    Mutation(
        "joined batch: no variance between processes",
        "normplug/_ops/collectives.py",
        "var = (weights * (variances + (means - mean).square())).sum(0)",
        "var = (weights * variances).sum(0)",
        tests_of(
            SYNC,
            "test_two_processes_are_as_close_to_float64_on_the_joined_batch_as_torch",
        ),
    ),
    Mutation(
        "joined batch by PyTorch's kernel: an empty batch of the first process",
        "normplug/_ops/collectives.py",
        "message[-1:] = _NEARLY_0",
        "message[-1:] = 0.0",
        tests_of(
            SYNC,
            "test_two_processes_are_as_close_to_float64_on_the_joined_batch_as_torch",
        ),
    ),
    Mutation(
        "joined batch: one value of all processes updates the running statistics",
        "normplug/_ops/collectives.py",
        "counts = None if t.x.numel() > t.x.shape[1] else n > 1",
        "counts = None",
        tests_of(SYNC, "test_three_processes_with_uneven_and_empty_batches"),
    ),
    Mutation(
        "joined batch: running variance over n",
        "normplug/_ops/collectives.py",
        "unbiased = var * (n / (n - 1).clamp(min=1))",
        "unbiased = var",
        tests_of(
            SYNC,
            "test_two_processes_are_as_close_to_float64_on_the_joined_batch_as_torch",
        ),
    ),
    Mutation(
        "joined operator: running variance over n",
        "normplug/_ops/batch_norm.py",
        "unbiased = var * (n / (n - 1).clamp(min=1))\n"
        "            torch_way.update_running(t, self.momentum",
        "unbiased = var\n            torch_way.update_running(t, self.momentum",
        tests_of(
            "tests/modules/test_sync_kernels.py",
            "test_in_each_of_two_processes"
            "[interpreted-the_operators_compute_the_same_as_an_eager_call]",
        ),
        INTERPRETER,
    ),
    Mutation(
        "InstanceNorm: running variance over n",
        "normplug/_ops/group_norm.py",
        "mean, var = mean.mean(0), var.mean(0) * (values / (values - 1))",
        "mean, var = mean.mean(0), var.mean(0)",
        tests_of(
            GROUP_NORM_KERNELS,
            "test_instance_norm_updates_its_running_statistics_from_the_kernels",
        ),
        INTERPRETER,
    ),
    Mutation(
        "cumulative average: one batch behind",
        "normplug/_ops/torch_way.py",
        "step = tracked.to(running_var).clamp(min=1).reciprocal()",
        "step = (tracked.to(running_var) + 1).reciprocal()",
        tests_of(EVERY_NORM, "test_running_statistics_average_those_of_the_rows"),
    ),
    Mutation(
        "eligible: compute capability 7.5 is refused",
        "normplug/_ops/can_run.py",
        "if capability < (7, 5):",
        "if capability <= (7, 5):",
        tests_of(
            CALLS, "test_a_gpu_that_cannot_run_the_kernels_is_refused_with_the_reason"
        ),
        INTERPRETER,
    ),
    Mutation(
        "layouts: dimensions of size 1 count",
        "normplug/_layouts.py",
        "if size != 1 and step != expected:",
        "if step != expected:",
        ("tests/test_layouts.py",),
    ),
    Mutation(
        "checks: a count of 0 passes",
        "normplug/_checks.py",
        "    if value < 1:\n",
        "    if value < 0:\n",
        tests_of(ARGUMENTS, "test_an_invalid_argument_raises_an_error_with_the_rule"),
    ),
    Mutation(
        "checks: a momentum of nan passes",
        "normplug/_checks.py",
        "if not -math.inf < value < math.inf:",
        "if value in (math.inf, -math.inf):",
        tests_of(ARGUMENTS, "test_an_invalid_argument_raises_an_error_with_the_rule"),
    ),
    Mutation(
        "checks: a running variance without a mean passes",
        "normplug/_checks.py",
        "if (mean is None) != (var is None):",
        "if var is None and mean is not None:",
        tests_of(
            ARGUMENTS, "test_an_invalid_call_raises_an_error_with_the_rule_and_the_values"
        ),
    ),
    # Modules.
    Mutation(
        "BatchNorm: weights that train are constants",
        "normplug/modules/batch_norm.py",
        "constant = not (training or trains)",
        "constant = not training",
        ("tests/interpreted/test_constant_kernels.py",),
        INTERPRETER,
    ),
    Mutation(
        "a gradient keeps its strides where a dimension has size 1",
        "normplug/_ops/torch_way.py",
        "if 1 in y.shape and y.device.type",
        "if 0 in y.shape and y.device.type",
        tests_of(
            "tests/functional/test_batch_norm.py",
            "test_a_layer_gives_the_right_gradient_for_one_of_any_layout",
        ),
    ),
    Mutation(
        "watched statistics move in evaluation",
        "normplug/modules/watched.py",
        'if not self.training or "watched_var" not in own or transforms_active():',
        'if "watched_var" not in own or transforms_active():',
        tests_of(
            "tests/modules/test_modules.py",
            "test_watched_statistics_are_exact_far_from_zero_and_rest_in_evaluation",
        ),
    ),
    # Swap, unswap, check, plan.
    Mutation(
        "check: a tolerance of 0.1",
        "normplug/_swap/check.py",
        "tolerance = max(4 * torch.finfo(x.dtype).eps, 1e-5)",
        "tolerance = max(4 * torch.finfo(x.dtype).eps, 0.1)",
        tests_of(CHECK, "test_an_output_that_is_off_by_a_thousandth_is_found"),
    ),
    Mutation(
        "check: nan equals every number",
        "normplug/_swap/check.py",
        "if not torch.equal(got.isfinite(), finite):",
        "if got.shape != expected.shape:",
        tests_of(CHECK, "test_a_layer_that_computes_something_else_is_found"),
    ),
    Mutation(
        "check: the generator of random is not restored",
        "normplug/_restore.py",
        "        random.setstate(state)\n",
        "",
        tests_of(
            CHECK, "test_random_models_are_compared_and_all_generators_are_put_back"
        ),
    ),
    Mutation(
        "fold: a shared weight is scaled twice",
        "normplug/_swap/fold.py",
        "                done.add(id(weight))\n",
        "",
        (FOLD,),
    ),
    Mutation(
        "fold: a weight with an offset is scaled without it",
        "normplug/_swap/fold.py",
        "scaled = (wide + offset) * factor - offset",
        "scaled = wide * factor",
        tests_of(
            "tests/swap/test_rms_adapters.py",
            "test_every_tool_works_in_mode_golden_and_unswap_restores_the_layer",
        ),
    ),
    Mutation(
        "swap: a failure leaves scaled weights",
        "normplug/_swap/swap.py",
        "            _fold.write(weight, value)\n",
        "            pass\n",
        tests_of(
            "tests/swap/test_swap.py", "test_a_failing_swap_leaves_the_model_as_it_was"
        ),
    ),
    Mutation(
        "by_depth: blocks are counted from 0",
        "normplug/_swap/layer_modes.py",
        "enumerate(blocks, 1)",
        "enumerate(blocks)",
        tests_of(
            "tests/swap/test_modes_by_layer.py",
            "test_by_depth_counts_blocks_and_leaves_the_final_norm_at_standard",
        ),
    ),
    Mutation(
        "plan: weight_norm is a norm layer",
        "normplug/_swap/inventory.py",
        'if "norm" not in name.lower() or name.startswith("_"):',
        'if "norm" not in name.lower():',
        (
            "tests/swap/test_plan.py",
            FOLD,
        ),
    ),
    # Fuse.
    Mutation(
        "convolutions: a gradient that others hold is changed",
        "normplug/native/convolutions.h",
        "t.use_count() == 1 && is_plain(t) &&",
        "is_plain(t) &&",
        tests_of(CONVOLUTIONS, "test_who_holds_the_shortcuts_gradient_sees_it_unchanged"),
        IN_CPP,
    ),
    Mutation(
        "convolutions: a gradient whose memory others hold is changed",
        "normplug/native/convolutions.h",
        "t.storage().use_count() == 1",
        "true",
        tests_of(CONVOLUTIONS, "test_who_holds_the_shortcuts_gradient_sees_it_unchanged"),
        IN_CPP,
    ),
    Mutation(
        "convolutions: the weight is not flipped",
        "normplug/native/convolutions.h",
        "weight.flip({2, 3})",
        "weight",
        tests_of(CONVOLUTIONS, "test_second_derivatives_are_right"),
        IN_CPP,
    ),
    Mutation(
        "convolutions: the shortcut loses the version of its input",
        "normplug/native/convolutions.h",
        "skip = x.detach();",
        "skip = x.variable_data();",
        tests_of(CONVOLUTIONS, "test_inputs_modified_in_place_are_detected"),
        IN_CPP,
    ),
    Mutation(
        "convolutions: an input in another dtype than autocast's goes to the shortcut",
        "normplug/_ops/convolutions.py",
        " or dtype != x.dtype:",
        ":",
        tests_of(CONVOLUTIONS, "test_autocast_casts_as_for_pytorchs_convolution"),
        IN_CPP,
    ),
    Mutation(
        "convolutions: a moved one with hooks runs too early",
        "normplug/_fuse/fuse.py",
        "m in followed or m in moved",
        "m in followed",
        tests_of(CONVOLUTIONS, "test_a_hook_on_a_convolution_that_moves_runs_in_order"),
        IN_CPP,
    ),
    Mutation(
        "beside: a shortcut may change its input",
        "normplug/_fuse/beside.py",
        "adds is not add_in_place or other.args[0] is not x",
        "True",
        tests_of(BESIDE, "test_a_convolution_without_a_plain_shortcut_is_left"),
    ),
    Mutation(
        "beside: a convolution with a bias is taken",
        "normplug/_ops/convolutions.py",
        "    if layer.bias is not None and not with_bias:\n",
        "    if False:\n",
        tests_of(BESIDE, "test_a_report_says_why_a_convolution_is_left"),
    ),
    Mutation(
        "trace: a module with hooks is inlined",
        "normplug/_fuse/fuse.py",
        "            and not has_hooks(m)\n",
        "",
        (CHANGES,),
    ),
    Mutation(
        "guard: hooks of an inlined module are ignored",
        "normplug/_fuse/fusion.py",
        "if self.called and has_hooks(module):",
        "if False:",
        (CHANGES,),
    ),
    Mutation(
        "guard: a module may change its class",
        "normplug/_fuse/fusion.py",
        "if inside and type(module) not in (reads.cls, FUSED_CLASSES.get(reads.cls)):",
        "if False:",
        (CHANGES,),
    ),
    Mutation(
        "guard: inputs of any type fit a trace",
        "normplug/_fuse/fusion.py",
        "                if not isinstance(value, Tensor):\n                    return False\n",
        "                pass\n",
        (
            CHANGES,
            SOURCE,
        ),
    ),
    Mutation(
        "guard: any sequence fits a trace",
        "normplug/_fuse/fusion.py",
        "                isinstance(item, Tensor) for item in value\n",
        "                True for item in value\n",
        (
            CHANGES,
            SOURCE,
        ),
    ),
    Mutation(
        "guard: a trace runs for more arguments than the forward takes",
        "normplug/_fuse/trace.py",
        "        if len(args) > len(self.positional):\n            return None\n",
        "",
        tests_of(
            SITES,
            "test_a_traced_forward_refuses_the_calls_that_the_users_own_refuses",
        ),
    ),
    Mutation(
        "guard: 1 and True are the same value",
        "normplug/_fuse/fusion.py",
        "if type(now) is not type(then) or now != then:",
        "if now != then:",
        (CHANGES,),
    ),
    Mutation(
        "trace: an attribute of any type is a constant",
        "normplug/_fuse/trace.py",
        "if not (_allowed(value) or all(isinstance(p, _CONSTANTS) for p in parts)):",
        "if False:",
        (SOURCE,),
    ),
    Mutation(
        "trace: a call with a number is not followed",
        "normplug/_fuse/trace.py",
        "            or kwargs\n",
        "            or kwargs or 2.0 in args\n",
        tests_of(
            SITES, "test_norms_are_fused_with_the_operations_next_to_them_in_every_mode"
        ),
    ),
    Mutation(
        "trace: a tensor that a forward makes is frozen",
        "normplug/_fuse/trace.py",
        "if isinstance(a, torch.Tensor):",
        "if False:",
        (SOURCE,),
    ),
    Mutation(
        "fused call: hooks are ignored",
        "normplug/_fuse/calls.py",
        "if isinstance(module, nn.Module) and has_hooks(module):",
        "if False:",
        tests_of(CHANGES, "test_hooks_on_norms_and_activations_run"),
    ),
    Mutation(
        "fused call: a residual of other strides is fused",
        "normplug/_fuse/calls.py",
        "        and residual.stride() == x.stride()\n",
        "",
        tests_of(SITES, "test_a_sum_of_two_memory_formats_has_that_of_its_left_operand"),
    ),
    Mutation(
        "fused call: a pooling with hooks is fused",
        "normplug/_fuse/calls.py",
        "pool.return_indices or has_hooks(pool)",
        "pool.return_indices",
        tests_of(CHANGES, "test_a_changed_pooling_computes_what_it_would_unfused"),
    ),
    Mutation(
        "sites: a norm that is called twice is fused",
        "normplug/_fuse/sites.py",
        "if times[norm] > 1 or not alone or refusal(norm):",
        "if not alone or refusal(norm):",
        tests_of(
            SITES,
            "test_a_norm_is_left_where_one_call_could_change_the_result",
        ),
    ),
    Mutation(
        "sites: a value is added to itself",
        "normplug/_fuse/sites.py",
        "if how is None or add.args[0] is add.args[1]:",
        "if how is None:",
        (SITES,),
    ),
    Mutation(
        "edit: a test that reads the sum is moved before it",
        "normplug/_fuse/edit.py",
        "return effect is None and not _reads(test, _assigned(statement)[0])",
        "return effect is None",
        tests_of(
            "tests/fuse/test_edited.py",
            "test_other_statements_are_left_and_the_reason_is_given",
        ),
    ),
    # Statistics.
    Mutation(
        "recalibrate: frozen layers are measured",
        "normplug/_tools/buffers.py",
        "for path, layer in layers.items() if not runs.is_frozen(layer)}",
        "for path, layer in layers.items()}",
        tests_of(BUFFERS, "test_frozen_layers_keep_their_statistics"),
    ),
    Mutation(
        "recalibrate: variance of a call over n",
        "normplug/_tools/buffers.py",
        "variances = biased[None] * (count / max(count - 1, 1))",
        "variances = biased[None]",
        tests_of(BUFFERS, "test_how_far_it_moved_counts_unbiased_variances"),
    ),
    Mutation(
        "sync_buffers: counts are rounded down",
        "normplug/_tools/buffers.py",
        "(moments.count / dist.get_world_size()).round()",
        "(moments.count / dist.get_world_size()).floor()",
        tests_of(
            BUFFERS,
            "test_two_processes_get_the_same_statistics_and_leave_frozen_ones_alone",
        ),
    ),
    Mutation(
        "sync_buffers: frozen layers are merged",
        "normplug/_tools/buffers.py",
        "for path, layer in layers.items() if not runs.is_frozen(layer)}",
        "for path, layer in layers.items()}",
        tests_of(
            BUFFERS,
            "test_two_processes_get_the_same_statistics_and_leave_frozen_ones_alone",
        ),
    ),
    Mutation(
        "sync_buffers: nan is merged",
        "normplug/_tools/buffers.py",
        "finite &= variance.to(layer.running_var.dtype).isfinite()",
        "finite &= True",
        tests_of(
            BUFFERS,
            "test_two_processes_get_the_same_statistics_and_leave_frozen_ones_alone",
        ),
    ),
    Mutation(
        "recalibrate: moments without the distance of means",
        "normplug/_tools/buffers.py",
        "self.m2 += m2.to(self.mean) + difference.square() * self.count * share",
        "self.m2 += m2.to(self.mean)",
        tests_of(BUFFERS, "test_statistics_are_those_of_all_the_data_in_uneven_batches"),
    ),
    Mutation(
        "freeze: gradients stay",
        "normplug/_tools/freezing.py",
        "            parameter.grad = None\n",
        "",
        tests_of(
            FREEZING,
            "test_freeze_removes_gradients_so_that_no_optimizer_moves_the_weights",
        ),
    ),
    Mutation(
        "freeze: a loaded layer's children do not train",
        "normplug/modules/frozen.py",
        "    if children:  # such as",
        "    if False:  # such as",
        tests_of(
            FROZEN_AND_TOOLS, "test_what_a_frozen_or_loaded_layer_holds_follows_train"
        ),
    ),
    Mutation(
        "thaw: parameters that did not train before train",
        "normplug/_tools/freezing.py",
        "if parameter.requires_grad:",
        "if True:",
        tests_of(FREEZING, "test_thaw_gives_back_what_the_freeze_took"),
    ),
    Mutation(
        "doctor: nothing but norms reads an output",
        "normplug/_tools/examination.py",
        "self._outputs[leaf].is_read = True",
        "self._outputs[leaf].is_read = False",
        tests_of(DOCTOR, "test_an_output_that_another_operation_reads_has_an_effect"),
    ),
    Mutation(
        "doctor: no standard errors are allowed",
        "normplug/_tools/doctor.py",
        "_ERRORS = 4  #",
        "_ERRORS = 0  #",
        tests_of(DOCTOR, "test_statistics_of_a_few_samples_are_not_stale_by_chance"),
    ),
    Mutation(
        "doctor: two values a channel are enough",
        "normplug/_tools/doctor.py",
        "_FEW = 16  #",
        "_FEW = 2  #",
        tests_of(DOCTOR, "test_a_fault_is_found_and_named_with_a_fix_that_ends_it"),
    ),
    Mutation(
        "doctor: tensors are not restored",
        "normplug/_tools/runs.py",
        "                write(subclasses.own_part(tensor), value)\n",
        "                pass\n",
        tests_of(BUFFERS, "test_buffers_and_parameters_are_left_by_name_and_bit_for_bit"),
    ),
    Mutation(
        "param_groups: a name makes a class a known norm",
        "normplug/_tools/groups.py",
        "if is_known_norm(module):",
        "if is_norm(module):",
        tests_of(GROUPS, "test_a_name_alone_takes_no_decay_from_a_matrix"),
    ),
    Mutation(
        "param_groups: a name makes a convolution a norm",
        "normplug/_tools/groups.py",
        "if isinstance(module, _MATRICES) or not is_norm(module):",
        "if not is_norm(module):",
        tests_of(GROUPS, "test_a_name_alone_takes_no_decay_from_a_matrix"),
    ),
    # The host path's Python.
    Mutation(
        "native: the compiler writes the library itself",
        "normplug/native/building.py",
        "*command(part)]",
        "*command(target)]",
        tests_of(BUILDING, "test_several_processes_may_compile_at_once"),
    ),
    Mutation(
        "native: others may write to a compiled file",
        "normplug/native/building.py",
        "umask=0o022",
        "umask=0",
        tests_of(BUILDING, "test_a_library_that_others_can_write_to_is_not_loaded"),
    ),
    Mutation(
        "native: others may write to the library",
        "normplug/native/building.py",
        "status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        "status.st_mode & stat.S_IWOTH",
        tests_of(BUILDING, "test_a_library_that_others_can_write_to_is_not_loaded"),
    ),
    Mutation(
        "native: an inner python_way ends the outer one",
        "normplug/native/__init__.py",
        "        _paused -= 1\n",
        "        _paused = 0\n",
        tests_of(BUILDING, "test_python_way_sends_calls_through_python"),
    ),
    Mutation(
        "native: the headers are not part of the file's name",
        "normplug/native/building.py",
        'glob("*.[ch]*")',
        'glob("*.cpp")',
        tests_of(BUILDING, "test_another_torch_python_or_source_means_another_file"),
    ),
    # The comparison of runs.
    Mutation(
        "compare: TOST by one of its two tests",
        "normplug/compare/runs.py",
        "return np.maximum(above, below)",
        "return below",
        tests_of(COMPARE, "test_a_margin_adds_the_p_of_an_equivalence"),
    ),
    Mutation(
        "compare: Bonferroni for Holm",
        "normplug/compare/runs.py",
        "np.arange(len(ps), 0, -1)",
        "len(ps)",
        tests_of(
            COMPARE,
            "test_p_is_that_of_a_paired_t_test_and_adjusted_for_the_number_of_arms",
        ),
    ),
    Mutation(
        "compare: p-values may fall by Holm's factors",
        "normplug/compare/runs.py",
        ".clip(upper=1).cummax()",
        ".clip(upper=1)",
        tests_of(
            COMPARE,
            "test_p_is_that_of_a_paired_t_test_and_adjusted_for_the_number_of_arms",
        ),
    ),
    Mutation(
        "compare: the oldest run of a seed counts",
        "normplug/compare/runs.py",
        'keep="last")',
        'keep="first")',
        tests_of(COMPARE, "test_of_the_runs_of_a_seed_the_newest_finished_one_counts"),
    ),
    # Experiments.
    Mutation(
        "experiment: biases decay",
        "normplug/experiment/learner.py",
        '"decay": float(p.dim() > 1)',
        '"decay": float(p.dim() > 0)',
        tests_of(
            TRAIN, "test_norms_and_biases_do_not_decay_and_what_is_frozen_is_left_out"
        ),
    ),
    Mutation(
        "experiment: one step rises",
        "normplug/experiment/learner.py",
        "rising = max(warmup, 2 / steps)",
        "rising = max(warmup, 1 / steps)",
        tests_of(TRAIN, "test_the_learning_rate_rises_to_its_value_and_falls"),
    ),
    Mutation(
        "experiment: a scaled start for half of the writers",
        "normplug/experiment/models.py",
        "math.sqrt(2 * depth)",
        "math.sqrt(depth)",
        tests_of(
            TRAIN,
            "test_a_scaled_start_is_of_the_layers_that_write_to_the_residual_stream",
        ),
    ),
    Mutation(
        "experiment: gamma0 is taken for its square",
        "normplug/experiment/models.py",
        "else cfg.gamma0**2",
        "else cfg.gamma0",
        tests_of(TRAIN, "test_gamma0_starts_as_the_mode_whose_root_it_is"),
    ),
    Mutation(
        "experiment: torch.compile in its default mode only",
        "normplug/experiment/run.py",
        "mode=cfg.compile if isinstance(cfg.compile, str) else None",
        "mode=None",
        tests_of(TRAIN, "test_a_model_is_compiled_in_the_mode_that_the_command_names"),
    ),
    Mutation(
        "experiment: a LightningModule is timed with another optimizer",
        "normplug/experiment/speed.py",
        "if isinstance(module, Learner) or not configures_optimizers(module):",
        "if True:",
        tests_of(SPEED, "test_a_lightning_module_is_timed_by_its_own_step_and_optimizer"),
    ),
    Mutation(
        "experiment: a validation counts as a step's time",
        "normplug/experiment/callbacks.py",
        "        self._start = None  # a validation came in between\n",
        "        pass\n",
        tests_of(TRAIN, "test_the_time_between_two_epochs_is_no_step"),
    ),
    Mutation(
        "handwritten: gradients are not compared",
        "normplug/adapters/behaviour.py",
        "        self._compare_gradients()\n",
        "",
        tests_of(
            HANDWRITTEN,
            "test_a_class_that_computes_something_else_stays_and_plan_says_why",
        ),
    ),
    Mutation(
        "handwritten: the class is only run in evaluation",
        "normplug/adapters/behaviour.py",
        "self._run(x, values, training=True)",
        "self._run(x, values)",
        tests_of(
            HANDWRITTEN,
            "test_a_class_that_computes_something_else_stays_and_plan_says_why",
        ),
    ),
    Mutation(
        "handwritten: a global that is used counts as a constant",
        "normplug/adapters/side_effects.py",
        'elif instruction.opname == "LOAD_GLOBAL":',
        'elif instruction.opname == "LOAD_NAME":',
        tests_of(
            HANDWRITTEN,
            "test_a_class_that_computes_something_else_stays_and_plan_says_why",
        ),
    ),
    Mutation(
        "convolutions: one moves past a change of its input",
        "normplug/_fuse/beside.py",
        "if moves and not _may_move(traced, node, shortcut):",
        "if False:",
        tests_of(BESIDE, "test_a_convolution_without_a_plain_shortcut_is_left"),
    ),
    Mutation(
        "run: a checkpoint names the target variance",
        "normplug/modules/base.py",
        "if metadata is not None and not self.is_stock_in_files():",
        "if metadata is not None:",
        tests_of(
            "tests/tools/test_run.py", "test_a_checkpoint_is_that_of_the_stock_layers"
        ),
    ),
    Mutation(
        "swap: an argument has our name, not the stock forward's",
        "normplug/modules/base.py",
        "if not can_be_named or len(names) < count or",
        "if True or",
        tests_of(GATED, "test_arguments_may_be_passed_by_their_names"),
    ),
    Mutation(
        "check: a layer whose arguments were renamed is not compared",
        "normplug/modules/base.py",
        "    ours.forward.copied_from = forward\n",
        "",
        tests_of(
            "tests/modules/test_guards.py",
            "test_a_stock_forward_gives_nan_and_check_names_the_layer",
        ),
    ),
    Mutation(
        "gated norms: a gate of many rows is refused",
        "normplug/modules/row_norms.py",
        "input, gate = torch.broadcast_tensors(input, gate)",
        "pass",
        tests_of(GATED, "test_the_gate_may_be_of_many_rows_or_values"),
    ),
    Mutation(
        "handwritten: layers of one class share what was learned",
        "normplug/adapters/handwritten.py",
        "        settings.append((name, value))\n",
        "        pass\n",
        tests_of(HANDWRITTEN, "test_layers_of_one_class_may_compute_two_formulas"),
    ),
    Mutation(
        "handwritten: the host path reads the usual names",
        "normplug/native/calls.h",
        "PyTuple_GET_ITEM(affine.ptr(), 1))",
        'PyUnicode_InternFromString("bias"))',
        tests_of(
            HOST_PATH,
            "test_a_module_call_reads_weight_and_bias_by_the_names_of_its_class",
        ),
        {"TRITON_INTERPRET": "1", "NORMPLUG_NATIVE": "1"},
    ),
    Mutation(
        "run: the model of an optimizer's parameters is not looked for",
        "normplug/_run/program.py",
        "        inner = {id(child) for m in modules for child in _children(m)}\n",
        "        inner = set()\n",
        tests_of(
            RUN, "test_an_optimizer_shows_the_whole_model_and_cpu_models_wait_for_a_gpu"
        ),
    ),
    Mutation(
        "run: a model with an error stays half swapped",
        "normplug/_run/program.py",
        "                    unswap(model, fold=False)\n",
        "                    pass\n",
        tests_of(RUN, "test_a_model_stays_as_it_was"),
    ),
    Mutation(
        "run: files have normplug's layers",
        "normplug/_run/program.py",
        "            layer._set(by_run=True)\n",
        "            pass\n",
        tests_of(RUN, "test_torchscript_compiles_the_stock_layers"),
    ),
    Mutation(
        "gated: a measured layer is measured with its gate",
        "normplug/modules/row_norms.py",
        "self._record(x, self._expected(x, self.training))",
        "self._record(x, self._run(x, gate, None))",
        tests_of(GATED, "test_what_is_measured_is_the_norm_without_its_gate"),
    ),
    Mutation(
        "modulation: a norm's result that is read twice",
        "normplug/_fuse/edit.py",
        "if not is_last and len(_reads(self.definition, target)) != 1:",
        "if not is_last and not _reads(self.definition, target):",
        tests_of(MODULATION, "test_what_may_compute_something_else_is_left"),
    ),
    Mutation(
        "modulation: the bias of the norm is not scaled",
        "normplug/modules/row_norms.py",
        "factor * bias.to(acc) + shift",
        "bias.to(acc) + shift",
        tests_of(MODULATION, "test_weight_and_bias_of_the_norm_count"),
    ),
    Mutation(
        "modulation: what runs in between is ignored",
        "normplug/_fuse/sites.py",
        'if not all(n.op in ("get_attr", "placeholder") or n.target in _PURE for n in amid):',
        "if not amid:",
        tests_of(MODULATION, "test_what_may_compute_something_else_is_left"),
    ),
    Mutation(
        "fuse: a sum moves past a test that it decides",
        "normplug/_fuse/edit.py",
        "return compares and not binds and all(map(self._is_fixed, parts))",
        "return True",
        tests_of(EDITED, "test_a_sum_stays_before_a_test_that_it_decides"),
    ),
    Mutation(
        "fuse: a sum that binds a variable moves past a test of it",
        "normplug/_fuse/edit.py",
        "return compares and not binds and",
        "return compares and",
        tests_of(EDITED, "test_a_sum_stays_before_a_test_that_it_decides"),
    ),
    Mutation(
        "fuse: a forward that assigns to a global variable is edited",
        "normplug/_fuse/edit.py",
        "if isinstance(node, (ast.Global, ast.Nonlocal)):",
        "if isinstance(node, ast.Nonlocal):",
        tests_of(EDITED, "test_a_forward_that_assigns_to_a_global_variable_is_left"),
    ),
    Mutation(
        "fuse: a trace bakes in the list that a child fills",
        "normplug/_fuse/trace.py",
        "return isinstance(value, (list, dict, set))",
        "return isinstance(value, (dict, set))",
        tests_of(
            SOURCE,
            "test_a_forward_that_a_trace_would_bake_values_into_is_left_with_the_reason",
        ),
    ),
    Mutation(
        "fuse: a call that fails leaves blocks fused",
        "normplug/_fuse/fuse.py",
        "        release(analysis.fusions)\n        raise\n",
        "        raise\n",
        tests_of(CLASSES, "test_a_fuse_that_fails_leaves_the_model_unfused"),
    ),
    Mutation(
        "fuse: a class's own __setattr__ sees its new class",
        "normplug/_convert.py",
        'object.__setattr__(module, "__class__", _below(type(module), cls))',
        "module.__class__ = _below(type(module), cls)",
        tests_of(CLASSES, "test_a_class_that_refuses_new_attributes_is_fused"),
    ),
    Mutation(
        "handwritten: channels first have four dimensions",
        "normplug/adapters/__init__.py",
        "super()._normalise(input.movedim(1, -1)).movedim(-1, 1)",
        "super()._normalise(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
        tests_of(
            HANDWRITTEN, "test_channels_may_be_the_second_of_any_number_of_dimensions"
        ),
    ),
    Mutation(
        "handwritten: a probe sees no shape with channels first",
        "normplug/adapters/behaviour.py",
        "self._compare_shape(dimensions, 1, values)",
        "pass",
        tests_of(
            HANDWRITTEN,
            "test_a_class_that_computes_something_else_stays_and_plan_says_why",
        ),
    ),
    Mutation(
        "handwritten: a probe has no frozen parameters",
        "normplug/adapters/behaviour.py",
        "frozen = {name: nn.Parameter(t, False) for name, t in values.items()}",
        "frozen = values",
        tests_of(
            HANDWRITTEN,
            "test_a_class_that_computes_something_else_stays_and_plan_says_why",
        ),
    ),
    Mutation(
        "recompute: the backward of normalised values divides by the deviation again",
        "normplug/_kernels/layer_norm/rows.py",
        "                factor = tl.full([T.r], 1.0, ACC)  # d * factor is the normalised value\n",
        "                factor = rstd\n",
        tests_of(
            RECOMPUTE,
            "test_under_autocast_gradients_from_normalised_values_are_as_exact",
        ),
        {"TRITON_INTERPRET": "1"},
    ),
)
