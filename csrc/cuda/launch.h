// What every CUDA launcher needs on the host: the stream, the size of the grid, and checks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

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

// Throws where a call, or the kernel launch before it, failed; names the op.
void check(cudaError_t status, const char* op);
inline void check_launch(const char* op) { check(cudaGetLastError(), op); }

}  // namespace zshard::cuda
