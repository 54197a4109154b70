#include "cuda/vector.cuh"
#include "ops.h"

namespace zshard::cuda {

namespace {

template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ CastArgs args) {
    constexpr int64_t kTile = kRunTile<To, From>;
    const auto count = static_cast<uint32_t>(args.src.count);
    for (int64_t tile = blockIdx.x; tile < tiles_of(args.numel, kTile) * count; tile += gridDim.x) {
        // Neighbours read from different ranks, so that the links to all of them are busy. Tiles
        // are numbered in 32 bits, which divide faster and are enough for any memory.
        const uint32_t rank = static_cast<uint32_t>(tile) % count;
        const int64_t i = static_cast<uint32_t>(tile) / count * kTile;
        const From* src = args.src.row<From>(rank);
        if (src == nullptr) continue;
        convert_run(static_cast<To*>(args.out) + rank * args.numel + i, src + i,
                    min(kTile, args.numel - i), Wide<From>{1});
    }
}

template <typename To, typename From>
void cast_typed(const CastArgs& args) {
    const int64_t tiles = tiles_of(args.numel, kRunTile<To, From>) * args.src.count;
    launch("cast_", cast_kernel<To, From>, grid_for(tiles), kThreads, args);
}

constexpr int kMasterWidth = 8;  // the 16-bit planes move in 16 bytes, fp32 in twice as many
constexpr int kMasterUnroll = 2;
constexpr int64_t kMasterTile = int64_t{kMasterUnroll} * kMasterWidth * kThreads;

// Calls one(i) and many(base, at, count, aligned) for the elements of a grid's tiles: `count`
// vectors that begin at base + at[u]. There the full values are aligned, and the planes if so said.
template <typename One, typename Many>
__device__ void for_master(const MasterArgs& args, One one, Many many) {
    for (int64_t i = blockIdx.x * kMasterTile; i < args.numel; i += gridDim.x * kMasterTile) {
        const Split split = split_run(reinterpret_cast<uint64_t>(args.full + i), sizeof(float),
                                      kMasterWidth, min(kMasterTile, args.numel - i));
        const int64_t first = i + split.head;
        const bool aligned =
            is_aligned<kMasterWidth>(args.hi + first) && is_aligned<kMasterWidth>(args.lo + first);
        deal<kMasterUnroll>(
            split, kMasterWidth, threadIdx.x, kThreads, [&](int64_t k) { one(i + k); },
            [&](const auto& at, auto count) { many(i, at, count, aligned); });
    }
}

__global__ void __launch_bounds__(kThreads) split_kernel(MasterArgs args) {
    const auto one = [&](int64_t i) {
        const SplitMaster planes = zshard::split_master(args.full[i]);
        args.hi[i] = planes.hi;
        args.lo[i] = planes.lo;
    };
    for_master(args, one, [&](int64_t base, const auto& at, auto count, bool aligned) {
        Vector<float, kMasterWidth> full[count];
#pragma unroll
        for (int u = 0; u < count; ++u)
            full[u] = load<kMasterWidth>(args.full + base + at[u], true);
#pragma unroll
        for (int u = 0; u < count; ++u) {
            Vector<Bf16, kMasterWidth> hi;
            Vector<int16_t, kMasterWidth> lo;
#pragma unroll
            for (int k = 0; k < kMasterWidth; ++k) {
                const SplitMaster planes = zshard::split_master(full[u].values[k]);
                hi.values[k] = planes.hi;
                lo.values[k] = planes.lo;
            }
            store(args.hi + base + at[u], hi, aligned);
            store(args.lo + base + at[u], lo, aligned);
        }
    });
}

__global__ void __launch_bounds__(kThreads) join_kernel(MasterArgs args) {
    const auto one = [&](int64_t i) {
        args.full[i] = zshard::join_master({args.hi[i], args.lo[i]});
    };
    for_master(args, one, [&](int64_t base, const auto& at, auto count, bool aligned) {
        Vector<Bf16, kMasterWidth> hi[count];
        Vector<int16_t, kMasterWidth> lo[count];
#pragma unroll
        for (int u = 0; u < count; ++u) {
            hi[u] = load<kMasterWidth>(args.hi + base + at[u], aligned);
            lo[u] = load<kMasterWidth>(args.lo + base + at[u], aligned);
        }
#pragma unroll
        for (int u = 0; u < count; ++u) {
            Vector<float, kMasterWidth> full;
#pragma unroll
            for (int k = 0; k < kMasterWidth; ++k)
                full.values[k] = zshard::join_master({hi[u].values[k], lo[u].values[k]});
            store(args.full + base + at[u], full, true);
        }
    });
}

}  // namespace

void cast(const CastArgs& args) {
    if (args.numel == 0) return;
    dispatch_cast(args.out_dtype, args.src.dtype,
                  [&](auto to, auto from) { cast_typed<decltype(to), decltype(from)>(args); });
}

void split_master(const MasterArgs& args) {
    if (args.numel == 0) return;
    launch("split_master_", split_kernel, grid_for(tiles_of(args.numel, kMasterTile)), kThreads,
           args);
}

void join_master(const MasterArgs& args) {
    if (args.numel == 0) return;
    launch("join_master_", join_kernel, grid_for(tiles_of(args.numel, kMasterTile)), kThreads,
           args);
}

}  // namespace zshard::cuda
