// Device memory for the length of a launcher.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace zshard::cuda {

// From torch's caching allocator. It hands freed memory only to work on the same stream, behind the
// kernels launched here, so it may be freed as soon as they are launched.
class Scratch {
 public:
    explicit Scratch(int64_t bytes)
        : tensor_(
              torch::stable::empty({bytes}, torch::headeronly::ScalarType::Byte, std::nullopt,
                                   torch::stable::Device(torch::headeronly::DeviceType::CUDA))) {}

    template <typename T>
    T* as() const {
        return static_cast<T*>(tensor_.data_ptr());
    }

 private:
    torch::stable::Tensor tensor_;
};

}  // namespace zshard::cuda
