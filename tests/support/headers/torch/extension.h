// In place of torch's header of this name: all that DeepSpeed's AdamW for CPUs takes from it. Parsing the
// real one takes half a minute. See tests/stages/test_trainer.py.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using at::Tensor;
constexpr auto kFloat32 = at::ScalarType::Float;
}  // namespace torch
