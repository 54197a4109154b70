#include "cuda/vector.cuh"
#include "ops.h"

namespace zshard::cuda {

namespace {

template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) cast_kernel(To* out, const From* src, int64_t numel) {
    for (int64_t i = blockIdx.x * kTile; i < numel; i += gridDim.x * kTile)
        convert_run(out + i, src + i, min(kTile, numel - i), Wide<From>{1});
}

template <typename To, typename From>
void cast_typed(const CastArgs& args) {
    launch("cast_", cast_kernel<To, From>, grid_for(tiles_of(args.numel)), kThreads,
           static_cast<To*>(args.out), static_cast<const From*>(args.src), args.numel);
}

// Calls one(i) and four(i, aligned) for the elements of a grid's tiles.
template <typename One, typename Four>
__device__ void for_master(const MasterArgs& args, One one, Four four) {
    for (int64_t i = blockIdx.x * kTile; i < args.numel; i += gridDim.x * kTile) {
        const Split split = split_run(reinterpret_cast<uint64_t>(args.full + i), sizeof(float), 4,
                                      min(kTile, args.numel - i));
        const int64_t first = i + split.head;
        const bool aligned = is_aligned<4>(args.hi + first) && is_aligned<4>(args.lo + first);
        deal<1>(
            split, 4, threadIdx.x, kThreads, [&](int64_t k) { one(i + k); },
            [&](const int64_t (&at)[1], auto) { four(i + at[0], aligned); });
    }
}

__global__ void __launch_bounds__(kThreads) split_kernel(MasterArgs args) {
    const auto one = [&](int64_t i) {
        const SplitMaster planes = zshard::split_master(args.full[i]);
        args.hi[i] = planes.hi;
        args.lo[i] = planes.lo;
    };
    for_master(args, one, [&](int64_t i, bool aligned) {
        const auto full = load<4>(args.full + i, true);
        Vector<Bf16, 4> hi;
        Vector<int16_t, 4> lo;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const SplitMaster planes = zshard::split_master(full.values[k]);
            hi.values[k] = planes.hi;
            lo.values[k] = planes.lo;
        }
        store(args.hi + i, hi, aligned);
        store(args.lo + i, lo, aligned);
    });
}

__global__ void __launch_bounds__(kThreads) join_kernel(MasterArgs args) {
    const auto one = [&](int64_t i) {
        args.full[i] = zshard::join_master({args.hi[i], args.lo[i]});
    };
    for_master(args, one, [&](int64_t i, bool aligned) {
        const auto hi = load<4>(args.hi + i, aligned);
        const auto lo = load<4>(args.lo + i, aligned);
        Vector<float, 4> full;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            full.values[k] = zshard::join_master({hi.values[k], lo.values[k]});
        store(args.full + i, full, true);
    });
}

}  // namespace

void cast(const CastArgs& args) {
    if (args.numel == 0) return;
    if (args.out_dtype == Dtype::kFloat64) {
        return args.src_dtype == Dtype::kFloat64 ? cast_typed<double, double>(args)
                                                 : cast_typed<double, float>(args);
    }
    if (args.src_dtype == Dtype::kFloat64) return cast_typed<float, double>(args);
    dispatch(args.out_dtype, [&](auto to) {
        dispatch(args.src_dtype,
                 [&](auto from) { cast_typed<decltype(to), decltype(from)>(args); });
    });
}

void split_master(const MasterArgs& args) {
    if (args.numel == 0) return;
    launch("split_master_", split_kernel, grid_for(tiles_of(args.numel)), kThreads, args);
}

void join_master(const MasterArgs& args) {
    if (args.numel == 0) return;
    launch("join_master_", join_kernel, grid_for(tiles_of(args.numel)), kThreads, args);
}

}  // namespace zshard::cuda
