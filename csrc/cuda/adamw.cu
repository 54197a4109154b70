#include <algorithm>

#include "cuda/scratch.h"
#include "cuda/vector.cuh"
#include "ops.h"

namespace zshard::cuda {

namespace {

constexpr int64_t kAdamwTile = 4096;  // seven streams need fewer elements each than one
constexpr int kPlanThreads = 1024;

__device__ int64_t adamw_tiles(const AdamwSegment& s) {
    return (s.end - s.begin + kAdamwTile - 1) / kAdamwTile;
}

// Where the prologue leaves its results: the tiles before each segment, their number behind the
// last, and each segment's factors.
struct Plan {
    int64_t* first_tile;    // (num_segments + 1,)
    AdamwFactors* factors;  // (num_segments,)
};

// The prologue, one block: counts the steps, computes the factors in double once per segment
// instead of once per element, and numbers the tiles. A skipped step has no tiles.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ AdamwRows rows, int64_t num_shards, Plan plan) {
    __shared__ int64_t sums[kPlanThreads];
    const bool skip = rows.skip != nullptr && *rows.skip != 0.0f;
    int64_t before = 0;
    for (int64_t base = 0; base < rows.num_segments; base += kPlanThreads) {
        const int64_t g = base + threadIdx.x;
        int64_t tiles = 0;
        if (g < rows.num_segments && !skip && (rows.active == nullptr || rows.active[g] != 0)) {
            const AdamwSegment segment = rows.segments[g];
            // Memory safety: the host cannot look at the rows without waiting for the device.
            if (segment.unit < 0 || segment.unit >= num_shards || segment.begin < 0 ||
                segment.begin > segment.end)
                __trap();
            plan.factors[g] = adamw_factors(rows.hypers[g], ++rows.steps[g]);
            tiles = adamw_tiles(segment);
        }
        // Inclusive sums of the threads' tiles, by doubling distances.
        sums[threadIdx.x] = tiles;
        __syncthreads();
        for (int distance = 1; distance < kPlanThreads; distance *= 2) {
            const int from = static_cast<int>(threadIdx.x) - distance;
            const int64_t other = from >= 0 ? sums[from] : 0;
            __syncthreads();
            sums[threadIdx.x] += other;
            __syncthreads();
        }
        if (g < rows.num_segments) plan.first_tile[g] = before + sums[threadIdx.x] - tiles;
        before += sums[kPlanThreads - 1];
        __syncthreads();
    }
    if (threadIdx.x == 0) plan.first_tile[rows.num_segments] = before;
}

// Shards travel as a kernel argument; more of them than fit take several launches.
template <int kCapacity>
struct Shards {
    int64_t first;
    AdamwShard items[kCapacity];
};
constexpr int kSmall = 32;
constexpr int kLarge = 576;  // just below the 32,764 bytes that a kernel's arguments may have
static_assert(sizeof(Shards<kLarge>) + 128 <= 32'764);

constexpr int kWidth = 4;  // fp32 moves in 16 bytes, 16-bit planes in 8
template <typename T>
using Group = Vector<T, kWidth>;

template <bool kSplit, typename Grad, typename Send>
struct Buffers {
    using Master = std::conditional_t<kSplit, Bf16, float>;
    using Copy = std::conditional_t<std::is_void_v<Send>, Bf16, Send>;

    Master* master;
    int16_t* low;
    float* m;
    float* v;
    const Grad* grad;
    Copy* send;

    __device__ Buffers(const AdamwShard& shard, int64_t at)
        : master(static_cast<Master*>(shard.master) + at),
          low(shard.low + at),
          m(shard.exp_avg + at),
          v(shard.exp_avg_sq + at),
          grad(static_cast<const Grad*>(shard.grad) + at),
          send(static_cast<Copy*>(shard.send) + at) {}

    __device__ Buffers(const Buffers& other, int64_t by)
        : master(other.master + by),
          low(other.low + by),
          m(other.m + by),
          v(other.v + by),
          grad(other.grad + by),
          send(other.send + by) {}

    __device__ bool aligned() const {
        return is_aligned<kWidth>(master) && is_aligned<kWidth>(m) && is_aligned<kWidth>(v) &&
               is_aligned<kWidth>(grad) && (!kSplit || is_aligned<kWidth>(low)) &&
               (std::is_void_v<Send> || is_aligned<kWidth>(send));
    }

    // Updates elements [i, i + kCount); kCount is 1, or kWidth where all of them are aligned.
    template <bool kDecoupled, int kCount>
    __device__ void update(int64_t i, float scale, const AdamwFactors& factors) const {
        auto masters = load<kCount>(master + i, true);
        auto ms = load<kCount>(m + i, true);
        auto vs = load<kCount>(v + i, true);
        const auto grads = load<kCount>(grad + i, true);
        Vector<int16_t, kCount> lows;
        if constexpr (kSplit) lows = load<kCount>(low + i, true);
        Vector<Copy, kCount> sends;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            AdamwState s{0.0f, ms.values[k], vs.values[k]};
            if constexpr (kSplit) {
                s.p = zshard::join_master({masters.values[k], lows.values[k]});
            } else {
                s.p = masters.values[k];
            }
            s = adamw_update<kDecoupled>(s, to_float(grads.values[k]) * scale, factors);
            ms.values[k] = s.m;
            vs.values[k] = s.v;
            if constexpr (kSplit) {
                const SplitMaster planes = zshard::split_master(s.p);
                masters.values[k] = planes.hi;
                lows.values[k] = planes.lo;
            } else {
                masters.values[k] = s.p;
            }
            sends.values[k] = from_float<Copy>(s.p);
        }
        store(master + i, masters, true);
        store(m + i, ms, true);
        store(v + i, vs, true);
        if constexpr (kSplit) store(low + i, lows, true);
        if constexpr (!std::is_void_v<Send>) store(send + i, sends, true);
    }

    template <bool kDecoupled>
    __device__ void update_run(int64_t numel, float scale, const AdamwFactors& factors) const {
        Split split = split_run(reinterpret_cast<uint64_t>(m), sizeof(float), kWidth, numel);
        if (!Buffers(*this, split.head).aligned()) split = {numel, 0, 0};
        deal<1>(
            split, kWidth, threadIdx.x, kThreads,
            [&](int64_t i) { update<kDecoupled, 1>(i, scale, factors); },
            [&](const int64_t (&at)[1], auto) {
                update<kDecoupled, kWidth>(at[0], scale, factors);
            });
    }
};

template <bool kSplit, typename Grad, typename Send, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ AdamwRows rows, Plan plan,
                 const __grid_constant__ Shards<kCapacity> shards) {
    const float scale = rows.grad_scale != nullptr ? *rows.grad_scale : 1.0f;
    const int64_t tiles = plan.first_tile[rows.num_segments];
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t g =
            last_not_after(rows.num_segments, tile, [&](int64_t i) { return plan.first_tile[i]; });
        const AdamwSegment segment = rows.segments[g];
        const int64_t unit = segment.unit - shards.first;
        if (unit < 0 || unit >= kCapacity) continue;
        const AdamwShard& shard = shards.items[unit];
        if (segment.end > shard.numel) __trap();
        const int64_t begin = segment.begin + (tile - plan.first_tile[g]) * kAdamwTile;
        const int64_t numel = min(kAdamwTile, segment.end - begin);
        const AdamwFactors factors = plan.factors[g];
        const Buffers<kSplit, Grad, Send> buffers(shard, begin);
        if (factors.decoupled) {
            buffers.template update_run<true>(numel, scale, factors);
        } else {
            buffers.template update_run<false>(numel, scale, factors);
        }
    }
}

template <bool kSplit, typename Grad, typename Send, int kCapacity>
void launch_shards(const AdamwArgs& args, const Plan& plan, size_t first, size_t count,
                   int64_t tiles) {
    Shards<kCapacity> shards{};
    shards.first = static_cast<int64_t>(first);
    std::copy_n(args.shards.begin() + shards.first, count, shards.items);
    launch("adamw_", adamw_kernel<kSplit, Grad, Send, kCapacity>, grid_for(tiles), kThreads,
           args.rows, plan, shards);
}

}  // namespace

void adamw(const AdamwArgs& args) {
    const int64_t rows = args.rows.num_segments;
    if (rows == 0) return;
    const int64_t factor_bytes = rows * int64_t{sizeof(AdamwFactors)};
    const Scratch scratch(factor_bytes + (rows + 1) * int64_t{sizeof(int64_t)});
    const Plan plan{.first_tile = reinterpret_cast<int64_t*>(scratch.as<char>() + factor_bytes),
                    .factors = scratch.as<AdamwFactors>()};
    const auto num_shards = static_cast<int64_t>(args.shards.size());
    launch("adamw_", plan_kernel, 1, kPlanThreads, args.rows, num_shards, plan);
    // How the segments cut the shards only the device knows: this many tiles at most, the rest of
    // the blocks end at once.
    int64_t tiles = rows;
    for (const AdamwShard& shard : args.shards)
        tiles += (shard.numel + kAdamwTile - 1) / kAdamwTile;
    dispatch_adamw(args, [&](auto grad, auto send, auto split) {
        using Grad = decltype(grad);
        using Send = typename decltype(send)::type;
        constexpr bool kSplit = decltype(split)::value;
        for (size_t first = 0; first < args.shards.size(); first += kLarge) {
            const size_t count = std::min<size_t>(kLarge, args.shards.size() - first);
            if (count <= kSmall) {
                launch_shards<kSplit, Grad, Send, kSmall>(args, plan, first, count, tiles);
            } else {
                launch_shards<kSplit, Grad, Send, kLarge>(args, plan, first, count, tiles);
            }
        }
    });
}

}  // namespace zshard::cuda
