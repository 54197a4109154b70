// What every CUDA launcher needs on the host: the stream, the size of the grid, and checks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace zshard::cuda {

inline constexpr int kThreads = 256;

// Elements of a tile, the work of one block: two or four vectors a thread in flight at once.
inline constexpr int64_t kTile = 8192;

constexpr int64_t tiles_of(int64_t numel) { return (numel + kTile - 1) / kTile; }

// One block a tile, which the hardware deals out as blocks end; kernels loop where there are more
// tiles than a grid may have blocks.
constexpr unsigned grid_for(int64_t tiles) {
    return static_cast<unsigned>(tiles < INT32_MAX ? tiles : INT32_MAX);
}

// The current device's current stream in torch.
cudaStream_t current_stream();

// Throws where a CUDA call failed; names the op.
void check(cudaError_t status, const char* op);

// Bytes that the arguments of a kernel may have, from sm_70 on.
inline constexpr size_t kMaxParamBytes = 32'764;

// Runs a kernel on the current stream. A failed launch throws.
template <typename... Params, typename... Args>
void launch(const char* op, void (*kernel)(Params...), unsigned grid, unsigned threads,
            Args&&... args) {
    static_assert(((sizeof(Params) + alignof(Params) - 1) + ... + 0) <= kMaxParamBytes);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.stream = current_stream();
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), op);
}

}  // namespace zshard::cuda
