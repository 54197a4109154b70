#include <optional>

#include "cuda/reduce.cuh"
#include "cuda/scratch.h"

namespace zshard::cuda {

namespace {

// Stores the group that starts at `i`, as far as its elements lie before `numel`.
template <bool kWhole, typename T>
__device__ void store_group(T* p, int64_t i, int64_t numel, const Vector<T, kSquareGroup>& group) {
    if (kWhole || i + kSquareGroup <= numel) {
        store(p + i, group, kWhole || is_aligned<kSquareGroup>(p));
    } else {
#pragma unroll
        for (int k = 0; k < kSquareGroup; ++k)
            if (i + k < numel) p[i + k] = group.values[k];
    }
}

// Blocks that a multiprocessor is to hold at a time, enough to keep its share of the memory's
// bandwidth busy. fp64 takes twice the registers, and has twice the bytes under way.
template <typename Acc>
constexpr int kReduceBlocks = sizeof(Acc) == 8 ? 2 : 5;

// aligned: acc and every chunk begin at a whole vector.
// partials: one for each block of kSquareBlock elements, or null.
template <typename Acc, typename Chunk>
__global__ void __launch_bounds__(kThreads, kReduceBlocks<Acc>)
    reduce_kernel(const __grid_constant__ ReduceArgs args, bool aligned, Partial* partials) {
    if (partials != nullptr) let_follow();
    auto* acc = static_cast<Acc*>(args.acc);
    // As many elements as a grid may have blocks of them are more than any memory holds.
    const int64_t begin = blockIdx.x * int64_t{kSquareBlock};
    const auto reduce = [&](auto kWhole) {
        const auto put = [&](int row, const Vector<Acc, kSquareGroup>& group) {
            store_group<kWhole>(acc + begin, place(row), args.numel - begin, group);
        };
        return reduce_block<kWhole, Acc, Chunk>(args.chunks, begin, args.numel, args.scale,
                                                args.accumulate ? acc : nullptr, put);
    };
    const Partial mine = aligned && begin + kSquareBlock <= args.numel ? reduce(std::true_type{})
                                                                       : reduce(std::false_type{});
    record(mine, partials);
}

// As reduce_kernel, of one row that stays as it is: it is only read.
template <typename T>
__global__ void __launch_bounds__(kThreads, kReduceBlocks<T>)
    measure_kernel(const T* values, int64_t numel, bool aligned, Partial* partials) {
    let_follow();
    const int64_t begin = blockIdx.x * int64_t{kSquareBlock};
    record(aligned && begin + kSquareBlock <= numel ? measure_block<true>(values, begin, numel)
                                                    : measure_block<false>(values, begin, numel),
           partials);
}

// One block of kSquareLanes threads: the blocks' sums in the order of [Note: sum of squares].
__global__ void __launch_bounds__(kSquareLanes)
    stats_kernel(const Partial* partials, int64_t count, double* stats) {
    __shared__ double lanes[kSquareLanes];
    await_predecessor();
    double sum = 0.0;
    bool bad = false;
    // All of a round are under way at once, the last round's too: no load is behind a branch, and
    // what is read again in the place of something missing counts as 0.
    constexpr unsigned kUnroll = 4;
    const auto end = static_cast<unsigned>(count);  // a grid has fewer blocks than 2^31
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < end; i += kUnroll * kSquareLanes) {
        Partial loaded[kUnroll];
#pragma unroll
        for (unsigned u = 0; u < kUnroll; ++u)
            loaded[u] = partials[min(i + u * kSquareLanes, end - 1)];
#pragma unroll
        for (unsigned u = 0; u < kUnroll; ++u) {
            sum += i + u * kSquareLanes < end ? loaded[u].sum : 0.0;
            bad |= loaded[u].bad;  // once more, of one that is read again
        }
    }
    lanes[threadIdx.x] = sum;
    bad = __syncthreads_or(bad);
    if (threadIdx.x >= kWarp) return;
    sum = halve<kSquareLanes / kWarp>(lanes);
    if (threadIdx.x > 0) return;
    stats[0] = sum;
    stats[1] = bad ? 1.0 : 0.0;
}

template <typename Acc, typename Chunk>
void reduce_typed(const ReduceArgs& args) {
    const int64_t blocks = square_blocks(args.numel);
    std::optional<Scratch> scratch;
    if (args.stats != nullptr) scratch.emplace(blocks * int64_t{sizeof(Partial)});
    auto* partials = scratch ? scratch->as<Partial>() : nullptr;
    if (blocks > 0) {
        bool aligned = is_aligned<kSquareGroup>(static_cast<const Acc*>(args.acc));
        for (int64_t rank = 0; rank < args.chunks.count; ++rank)
            aligned &= is_aligned<kSquareGroup>(args.chunks.row<Chunk>(rank));
        const auto grid = static_cast<unsigned>(blocks);
        if (!args.in_place) {
            launch("reduce_", reduce_kernel<Acc, Chunk>, grid, kThreads, args, aligned, partials);
        } else if (partials != nullptr) {
            launch("reduce_", measure_kernel<Acc>, grid, kThreads,
                   static_cast<const Acc*>(args.acc), args.numel, aligned, partials);
        }
    }
    if (args.stats == nullptr) return;
    finish_stats("reduce_", partials, blocks, args.stats);
}

}  // namespace

void finish_stats(const char* op, const Partial* partials, int64_t blocks, double* stats) {
    const Order order = blocks > 0 ? Order::kFollowing : Order::kBehind;
    launch(op, order, stats_kernel, 1, kSquareLanes, partials, blocks, stats);
}

void reduce(const ReduceArgs& args) {
    dispatch_pair(args.acc_dtype, args.chunks.dtype, [&](auto acc, auto chunk) {
        reduce_typed<decltype(acc), decltype(chunk)>(args);
    });
}

}  // namespace zshard::cuda
