"""Where the GPU's time goes: kernels in groups by their names."""

import pytest
import torch

from normplug.bench import groups
from normplug.bench.groups import GROUPS, group, profiled, summed


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("batch_norm_columns_forward", "norm"),
        ("layer_norm_wide_backward", "norm"),
        ("void at::native::batch_norm_transform_input_channels_last_kernel<c10::BFloat16>", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norm"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float>", "norm"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NHWC<__nv_bfloat16, float>", "norm"),
        ("triton_red_fused__native_batch_norm_legit_functional_add_relu_4", "norm"),
        ("triton_per_fused__to_copy_add_native_layer_norm_7", "norm"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "conv/gemm"),
        ("sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "conv/gemm"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop>", "conv/gemm"),
        ("void wgrad2d_grouped_direct_kernel<__nv_bfloat16, float>", "conv/gemm"),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits>", "conv/gemm"),
        ("triton_tem_fused_mm_0", "conv/gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, normal_and_transform>", "elementwise"),
        ("triton_poi_fused__to_copy_add_convolution_relu_3", "elementwise"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copy"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<float>", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("triton_poi_fused__to_copy_convolution_12", "copy"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<copy>", "optimizer"),
        ("void at::native::(anonymous namespace)::max_pool_forward_nhwc<float>", "other"),
        ("triton_red_fused_sum_5", "other"),
    ],
)
def test_a_kernel_is_in_the_group_that_its_name_speaks_for(kernel, expected):
    assert group(kernel) == expected
    assert {expected, *groups.LIBRARIES, *groups.INDUCTOR} <= set(GROUPS)


def test_a_profile_counts_the_gpus_work_once_and_nothing_else():
    events = [
        {"ph": "X", "cat": "kernel", "name": "layer_norm_rows_forward", "dur": 3000.0},
        {"ph": "X", "cat": "kernel", "name": "layer_norm_rows_forward", "dur": 1000.0},
        {"ph": "X", "cat": "kernel", "name": "some_gemm", "dur": 6000.0},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "dur": 200.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "Optimizer.step#SGD.step", "dur": 9e9},
        {"ph": "X", "cat": "cpu_op", "name": "aten::layer_norm", "dur": 9e9},
        {"ph": "M", "name": "process_name"},
    ]
    found = summed(events, 2)
    assert found["groups_ms"] == dict.fromkeys(GROUPS, 0.0) | {
        "norm": 2.0,
        "conv/gemm": 3.0,
        "copy": pytest.approx(0.1),
    }
    assert found["kernels"][:2] == [
        {"name": "some_gemm", "group": "conv/gemm", "ms": 3.0, "calls": 0.5},
        {"name": "layer_norm_rows_forward", "group": "norm", "ms": 2.0, "calls": 1.0},
    ]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11
def test_profiling_calls_the_step_so_often_and_reads_the_trace():
    done = []
    found = profiled(lambda: done.append(torch.ones(3) + 1))
    assert len(done) == groups.STEPS
    assert list(found["groups_ms"]) == list(GROUPS)
