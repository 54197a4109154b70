// What every CUDA launcher needs on the host: the stream, the size of the grid, and checks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace zshard::cuda {

inline constexpr int kThreads = 256;

// Runs of `tile` elements, the work of one block each.
constexpr int64_t tiles_of(int64_t numel, int64_t tile) { return (numel + tile - 1) / tile; }

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

// [Note: kernels that follow] From sm_90 on a kernel may be launched to follow its predecessor on
// the stream. As soon as each block of the predecessor has called let_follow() or ended, blocks of
// the follower take what room there is. Every block of a follower has to call await_predecessor(),
// and before that touch nothing that another kernel uses: then whoever comes behind the follower
// comes behind its predecessor as well. Where one of the two has few blocks this hides the launch:
// 0.6 to 2.6 us of an H200.
__device__ __forceinline__ void let_follow() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ void await_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// How a kernel is launched: behind the one before it, or to follow it.
enum class Order { kBehind, kFollowing };

// Whether the current device and the code for it know followers.
bool has_followers();

// Runs a kernel on the current stream. A failed launch throws.
template <typename... Params, typename... Args>
void launch(const char* op, Order order, void (*kernel)(Params...), unsigned grid, unsigned threads,
            Args&&... args) {
    static_assert(((sizeof(Params) + alignof(Params) - 1) + ... + 0) <= kMaxParamBytes);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.stream = current_stream();
    cudaLaunchAttribute follows{};
    if (order == Order::kFollowing && has_followers()) {
        follows.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        follows.val.programmaticStreamSerializationAllowed = 1;
        config.attrs = &follows;
        config.numAttrs = 1;
    }
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), op);
}

template <typename... Params, typename... Args>
void launch(const char* op, void (*kernel)(Params...), unsigned grid, unsigned threads,
            Args&&... args) {
    launch(op, Order::kBehind, kernel, grid, threads, std::forward<Args>(args)...);
}

}  // namespace zshard::cuda
