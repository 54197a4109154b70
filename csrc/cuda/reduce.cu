#include <optional>

#include "cuda/scratch.h"
#include "cuda/vector.cuh"
#include "ops.h"

namespace zshard::cuda {

namespace {

// What a block of elements, or all of them, come to.
struct Partial {
    double sum;  // of squares
    bool bad;    // some value is not finite
};

static_assert(kSquareColumns == kThreads);
constexpr int kRow = kSquareColumns * kSquareGroup;

// Adds sums[0 .. 2 * half), one a thread, by halving; the result is in sums[0].
__device__ void halve(double* sums, unsigned half) {
    for (; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
}

// The group of elements that starts at `i`; those from `numel` on are 0.
template <bool kWhole, typename T>
__device__ Vector<T, kSquareGroup> load_group(const T* p, int64_t i, int64_t numel, bool aligned) {
    if (kWhole || i + kSquareGroup <= numel) return load<kSquareGroup>(p + i, kWhole || aligned);
    Vector<T, kSquareGroup> group{};
#pragma unroll
    for (int k = 0; k < kSquareGroup; ++k)
        if (i + k < numel) group.values[k] = p[i + k];
    return group;
}

// Sums a block's part of the chunks in rank order, stores it, and returns the stored values'
// squares as far as this thread adds them: its rows, then its group. [Note: sum of squares]
// kWhole: every element of the block exists, at an aligned place. A load behind a branch is waited
// for at once; without branches those of all rows, and of two ranks, are under way together.
template <bool kWhole, typename Acc, typename Chunk>
__device__ Partial reduce_block(const ReduceArgs& args, int64_t begin) {
    using W = Wide<Acc>;
    auto* acc = static_cast<Acc*>(args.acc) + begin;
    const int64_t numel = args.numel - begin;
    const auto at = [](int row) { return int64_t{row * kRow} + threadIdx.x * kSquareGroup; };
    W wide[kSquareRows][kSquareGroup];
#pragma unroll kWhole && sizeof(Chunk) == 2 ? 2 : 1
    for (int64_t rank = 0; rank < args.chunks.count; ++rank) {
        const Chunk* chunk = args.chunks.row<Chunk>(rank) + begin;
        const bool aligned = is_aligned<kSquareGroup>(chunk);
        Vector<Chunk, kSquareGroup> loaded[kSquareRows];
#pragma unroll
        for (int row = 0; row < kSquareRows; ++row)
            loaded[row] = load_group<kWhole>(chunk, at(row), numel, aligned);
#pragma unroll
        for (int row = 0; row < kSquareRows; ++row)
#pragma unroll
            for (int k = 0; k < kSquareGroup; ++k) {
                const W value = convert<W>(loaded[row].values[k]);
                wide[row][k] = rank == 0 ? value : wide[row][k] + value;
            }
    }
    const bool aligned = is_aligned<kSquareGroup>(acc);
    double squares[kSquareGroup] = {};
    bool bad = false;
    Vector<Acc, kSquareGroup> stored[kSquareRows] = {};
    if (args.accumulate) {
#pragma unroll
        for (int row = 0; row < kSquareRows; ++row)
            stored[row] = load_group<kWhole>(acc, at(row), numel, aligned);
    }
#pragma unroll
    for (int row = 0; row < kSquareRows; ++row) {
        Acc* values = stored[row].values;
#pragma unroll
        for (int k = 0; k < kSquareGroup; ++k) {
            const W value = wide[row][k] * static_cast<W>(args.scale);
            values[k] = convert<Acc>(args.accumulate ? convert<W>(values[k]) + value : value);
            if (!kWhole && at(row) + k >= numel) values[k] = Acc{};
            const double x = convert<W>(values[k]);
            bad |= !isfinite(x);
            squares[k] = row == 0 ? x * x : squares[k] + x * x;
        }
        if (kWhole || at(row) + kSquareGroup <= numel) {
            store(acc + at(row), stored[row], kWhole || aligned);
        } else {
#pragma unroll
            for (int k = 0; k < kSquareGroup; ++k)
                if (at(row) + k < numel) acc[at(row) + k] = values[k];
        }
    }
    static_assert(kSquareGroup == 4);
    return {(squares[0] + squares[2]) + (squares[1] + squares[3]), bad};
}

// Blocks that a multiprocessor is to hold at a time, enough to keep its share of the memory's
// bandwidth busy. fp64 takes twice the registers, and has twice the bytes under way.
template <typename Acc>
constexpr int kReduceBlocks = sizeof(Acc) == 8 ? 2 : 3;

// aligned: acc and every chunk begin at a whole vector.
// partials: one for each block of kSquareBlock elements, or null.
template <typename Acc, typename Chunk>
__global__ void __launch_bounds__(kThreads, kReduceBlocks<Acc>)
    reduce_kernel(const __grid_constant__ ReduceArgs args, bool aligned, Partial* partials) {
    __shared__ double sums[kSquareColumns];
    for (int64_t block = blockIdx.x; block * kSquareBlock < args.numel; block += gridDim.x) {
        const int64_t begin = block * kSquareBlock;
        const Partial mine = aligned && begin + kSquareBlock <= args.numel
                                 ? reduce_block<true, Acc, Chunk>(args, begin)
                                 : reduce_block<false, Acc, Chunk>(args, begin);
        if (partials == nullptr) continue;
        sums[threadIdx.x] = mine.sum;
        const bool bad = __syncthreads_or(mine.bad);
        halve(sums, kSquareColumns / 2);
        if (threadIdx.x == 0) partials[block] = {sums[0], bad};
    }
}

// One block of kSquareLanes threads: the blocks' sums in the order of [Note: sum of squares].
__global__ void __launch_bounds__(kSquareLanes)
    stats_kernel(const Partial* partials, int64_t count, double* stats) {
    __shared__ double lanes[kSquareLanes];
    double sum = 0.0;
    bool bad = false;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += kSquareLanes) {
        sum += partials[i].sum;
        bad |= partials[i].bad;
    }
    lanes[threadIdx.x] = sum;
    bad = __syncthreads_or(bad);
    halve(lanes, kSquareLanes / 2);
    if (threadIdx.x > 0) return;
    stats[0] = lanes[0];
    stats[1] = bad ? 1.0 : 0.0;
}

template <typename Acc, typename Chunk>
void reduce_typed(const ReduceArgs& args) {
    const int64_t blocks = (args.numel + kSquareBlock - 1) / kSquareBlock;
    std::optional<Scratch> scratch;
    if (args.stats != nullptr) scratch.emplace(blocks * int64_t{sizeof(Partial)});
    auto* partials = scratch ? scratch->as<Partial>() : nullptr;
    if (blocks > 0) {
        bool aligned = is_aligned<kSquareGroup>(static_cast<const Acc*>(args.acc));
        for (int64_t rank = 0; rank < args.chunks.count; ++rank)
            aligned &= is_aligned<kSquareGroup>(args.chunks.row<Chunk>(rank));
        launch("reduce_", reduce_kernel<Acc, Chunk>, grid_for(blocks), kThreads, args, aligned,
               partials);
    }
    if (args.stats == nullptr) return;
    launch("reduce_", stats_kernel, 1, kSquareLanes, partials, blocks, args.stats);
}

}  // namespace

void reduce(const ReduceArgs& args) {
    if (args.acc_dtype == Dtype::kFloat64) return reduce_typed<double, double>(args);
    dispatch(args.acc_dtype, [&](auto acc) {
        dispatch(args.chunks.dtype,
                 [&](auto chunk) { reduce_typed<decltype(acc), decltype(chunk)>(args); });
    });
}

}  // namespace zshard::cuda
