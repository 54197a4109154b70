// Just enough of CUDA to run csrc/cuda/*.cu on the host, where there is no GPU: kernels_test.cpp
// compiles them with this header in place of the real one. A block's threads are fibres that take
// turns at barriers; blocks run one after another. What it cannot show: the device's own
// conversions, its memory model within a warp, and speed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

struct dim3 {
    unsigned x;
    dim3(unsigned count = 1) : x(count) {}
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
template <typename T>
void __stwb(T* p, T value) {
    *p = value;
}

using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr cudaError_t cudaSuccess = 0;

struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
inline constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 6;

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
using std::isfinite, std::max, std::min;

namespace zshard::device {

// Waits for the block's other threads; returns whether any of them brought a value that is not 0.
int barrier(int value);

// Waits for the other threads of the warp, and returns what the one `delta` behind has brought.
double shuffle_down(double value, unsigned delta);

// Runs body once for each thread of each block. An error where a thread traps; the test fails where
// threads do not all reach a barrier.
cudaError_t run(dim3 grid, dim3 block, const std::function<void()>& body);

struct Trap {};

}  // namespace zshard::device

inline void __syncthreads() { zshard::device::barrier(0); }
inline int __syncthreads_or(int value) { return zshard::device::barrier(value); }
inline double __shfl_down_sync(unsigned /*mask: of all*/, double value, unsigned delta) {
    return zshard::device::shuffle_down(value, delta);
}
[[noreturn]] inline void __trap() { throw zshard::device::Trap{}; }

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
#define __CUDA_ARCH_LIST__ 800, 900
inline constexpr int cudaDevAttrComputeCapabilityMajor = 75;
inline cudaError_t cudaDeviceGetAttribute(int* value, int /*attribute*/, int /*device*/) {
    *value = 9;
    return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "a thread trapped"; }

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Args&... args) {
    return zshard::device::run(config->gridDim, config->blockDim, [&] { kernel(args...); });
}
