#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace zshard::cuda {

void check(cudaError_t status, const char* op) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string("zshard ") + op + ": CUDA error " +
                             std::to_string(static_cast<int>(status)) + ", " +
                             cudaGetErrorString(status));
}

cudaStream_t current_stream() {
    // The stable ABI has no stream before torch 2.13, and this symbol is missing from CPU builds of
    // torch, under which the same binary must load.
    using Getter = int32_t (*)(int32_t device, void** stream);
    static const auto getter =
        reinterpret_cast<Getter>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    void* stream = nullptr;
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (getter == nullptr || getter(device, &stream) != 0)
        throw std::runtime_error(
            "zshard: cannot get torch's current CUDA stream: install a CUDA build of torch");
    return static_cast<cudaStream_t>(stream);
}

bool has_followers() {
    // Code for sm_80 alone may have been compiled for this device only now, from its PTX, and there
    // await_predecessor() does nothing. The newest PTX is what the build leaves in.
    if (std::max({__CUDA_ARCH_LIST__}) < 900) return false;
    int device = 0, major = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "cudaDeviceGetAttribute");
    return major >= 9;
}

}  // namespace zshard::cuda
