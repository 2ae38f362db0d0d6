// The autograd node of a convolution next to a norm: see `normplug._ops.convolutions`.
//
// It is a convolution that keeps the size of its input: stride 1, no dilation, no bias, and either
// 1x1 without groups or depthwise.
#pragma once

#include <tuple>

#include "calls.h"

namespace normplug {

inline Tensor convolve(const Tensor& x, const Tensor& weight) {
  // Autocast has cast the tensors already. A backward may run where autocast is on.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return at::convolution(x, weight, {}, {1, 1}, {weight.size(2) / 2, weight.size(3) / 2}, {1, 1},
                         false, {0, 0}, x.size(1) / weight.size(1));
}

// The gradients of x and of the weight, each undefined if it is not needed.
inline std::tuple<Tensor, Tensor> convolve_backward(const Tensor& dy, const Tensor& x,
                                                    const Tensor& weight, bool needs_x,
                                                    bool needs_weight) {
  if (!needs_x && !needs_weight) return {};
  auto [dx, dweight, dbias] = at::convolution_backward(
      dy, x, weight, std::nullopt, {1, 1}, {weight.size(2) / 2, weight.size(3) / 2}, {1, 1}, false,
      {0, 0}, x.size(1) / weight.size(1), {needs_x, needs_weight, false});
  return {dx, dweight};
}

// A channels_last tensor as a matrix of pixels and channels.
inline Tensor pixels(const Tensor& t) { return t.permute({0, 2, 3, 1}).view({-1, t.size(1)}); }

// Whether a gradient may be changed in place: nothing else holds it. Autograd's own sums of gradients
// follow this rule. t must be the only reference of the caller.
inline bool is_unshared(const Tensor& t) {
  return !at::GradMode::is_enabled() && t.use_count() == 1 && is_plain(t) &&
         t.storage().use_count() == 1;
}

struct ConvolutionBackward : public Node {
  SavedVariable x_;
  SavedVariable weight_;

  std::string name() const override { return "NormplugConvolutionBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
  }

  std::tuple<Tensor, Tensor> unpacked() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {x_.unpack(), weight_.unpack()};
  }

  // grads: of y, and of x as the second result, if there is one.
  variable_list apply(variable_list&& grads) override {
    auto [x, weight] = unpacked();
    Tensor dy = readable(grads[0]), dskip;
    if (grads.size() > 1) dskip = std::move(grads[1]);
    if (!dy.defined()) return {dskip, Tensor()};
    bool needs_x = task_should_compute_output(0), needs_weight = task_should_compute_output(1);
    auto format = x.suggest_memory_format();
    bool is_depthwise = weight.size(1) != x.size(1);
    bool accumulates = needs_x && dskip.defined() && is_unshared(dskip) &&
                       format == at::MemoryFormat::ChannelsLast && dskip.is_contiguous(format);
    auto [dx, dweight] = convolve_backward(
        dy, x, weight, needs_x && !is_depthwise && !accumulates, needs_weight);
    if (needs_x && is_depthwise) dx = convolve(dy.contiguous(format), weight.flip({2, 3}));
    if (accumulates) {
      Tensor matrix = weight.reshape({weight.size(0), weight.size(1)});
      pixels(dskip).addmm_(pixels(dy.contiguous(format)), matrix);
      return {dskip, dweight};
    }
    if (needs_x && dskip.defined()) dx = dskip + dx;
    return {dx, dweight};
  }
};

// What autocast makes of an argument of a convolution.
inline Tensor autocasted(const Tensor& t) {
  auto device = t.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return t;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
}

// y, and x as a second result if `forks`.
inline std::tuple<Tensor, Tensor> convolve_with_history(const Tensor& input, const Tensor& parameter,
                                                        bool forks) {
  Tensor x = autocasted(input), weight = autocasted(parameter), y, skip;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    y = convolve(x, weight);
  }
  auto node = make_node<ConvolutionBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
  torch::autograd::set_history(y, node);
  if (forks) {
    skip = x.detach();  // with x's memory and version
    torch::autograd::set_history(skip, node);
  }
  node->x_ = SavedVariable(x, false);
  node->weight_ = SavedVariable(weight, false);
  created(node);
  return {y, skip};
}

}  // namespace normplug
