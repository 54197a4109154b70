// Every optimizer's step on CUDA: a prologue over the segments, then a block a tile; [Note:
// optimizer rules].
#pragma once

#include <algorithm>

#include "cuda/scratch.h"
#include "cuda/vector.cuh"
#include "ops.h"

namespace zshard::cuda {

inline constexpr int64_t kOptimTile = 4096;  // seven streams need fewer elements each than one
inline constexpr int kPlanThreads = 1024;

constexpr int64_t optim_tiles(int64_t numel) { return (numel + kOptimTile - 1) / kOptimTile; }

// Where the prologue leaves its results: the tiles before each segment, their number behind the
// last, and each segment's factors.
template <typename Rule>
struct Plan {
    int64_t* first_tile;              // (num_segments + 1,)
    typename Rule::Factors* factors;  // (num_segments,)
};

// The prologue, one block: counts the steps, computes the factors in double once per
// segment instead of once per element, and numbers the tiles. A skipped step has no tiles. What
// works on the tiles follows it; [Note: kernels that follow]. `extent`: the elements of the only
// shard, in which the segments have to ascend; or -1.
template <typename Rule>
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ OptimRows<Rule> rows, int64_t num_shards, int64_t extent,
                Plan<Rule> plan) {
    __shared__ int64_t sums[kPlanThreads];
    let_follow();
    const bool skip = rows.skip != nullptr && *rows.skip != 0.0f;
    int64_t before = 0;
    for (int64_t base = 0; base < rows.num_segments; base += blockDim.x) {
        const int64_t g = base + threadIdx.x;
        int64_t tiles = 0;
        if (extent >= 0 && g < rows.num_segments &&
            (rows.segments[g].end > extent ||
             (g > 0 && rows.segments[g - 1].end > rows.segments[g].begin)))
            __trap();
        if (g < rows.num_segments && !skip && (rows.active == nullptr || rows.active[g] != 0)) {
            const Segment segment = rows.segments[g];
            // Memory safety: the host cannot look at the rows without waiting for the device.
            if (segment.shard < 0 || segment.shard >= num_shards || segment.begin < 0 ||
                segment.begin > segment.end)
                __trap();
            plan.factors[g] = Rule::factors(rows.hypers[g], ++rows.steps[g]);
            tiles = optim_tiles(segment.end - segment.begin);
        }
        // Inclusive sums of the threads' tiles, by doubling distances.
        sums[threadIdx.x] = tiles;
        __syncthreads();
        for (unsigned distance = 1; distance < blockDim.x; distance *= 2) {
            const int64_t other = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
            __syncthreads();
            sums[threadIdx.x] += other;
            __syncthreads();
        }
        if (g < rows.num_segments) plan.first_tile[g] = before + sums[threadIdx.x] - tiles;
        before += sums[blockDim.x - 1];
        __syncthreads();
    }
    if (threadIdx.x == 0) plan.first_tile[rows.num_segments] = before;
}

template <typename Rule>
constexpr int64_t plan_bytes(int64_t rows) {
    return (rows + 1) * int64_t{sizeof(int64_t)} + rows * int64_t{sizeof(typename Rule::Factors)};
}

// Runs the prologue; scratch: plan_bytes.
template <typename Rule>
Plan<Rule> make_plan(const char* op, const OptimRows<Rule>& rows, int64_t num_shards,
                     int64_t extent, const Scratch& scratch) {
    auto* first_tile = scratch.as<int64_t>();
    const Plan<Rule> plan{
        .first_tile = first_tile,
        .factors = reinterpret_cast<typename Rule::Factors*>(first_tile + rows.num_segments + 1)};
    const int64_t threads = std::clamp<int64_t>(rows.num_segments, 32, kPlanThreads);
    launch(op, plan_kernel<Rule>, 1, static_cast<unsigned>(threads), rows, num_shards, extent,
           plan);
    return plan;
}

// Shards travel as a kernel argument; more of them than fit take several launches.
template <typename Rule, int kCapacity>
struct Shards {
    int64_t first;
    OptimShard<Rule> items[kCapacity];
};
inline constexpr int kFewShards = 32;
// The most that fit into a kernel's arguments, the others below 128 bytes.
template <typename Rule>
constexpr int kManyShards = (kMaxParamBytes - 128 - sizeof(int64_t)) / sizeof(OptimShard<Rule>);

inline constexpr int kOptimWidth = 4;  // fp32 moves in 16 bytes, 16-bit planes in 8

template <typename Rule, bool kSplit, typename Grad, typename Send>
struct Buffers {
    using Master = std::conditional_t<kSplit, Bf16, float>;
    using Copy = std::conditional_t<std::is_void_v<Send>, Bf16, Send>;

    Master* master;
    int16_t* low;
    float* states[Rule::kStates];
    const Grad* grad;
    Copy* send;

    __device__ Buffers(const OptimShard<Rule>& shard, int64_t at)
        : master(static_cast<Master*>(shard.master) + at),
          low(shard.low + at),
          grad(static_cast<const Grad*>(shard.grad) + at),
          send(static_cast<Copy*>(shard.send) + at) {
#pragma unroll
        for (int s = 0; s < Rule::kStates; ++s) states[s] = shard.states[s] + at;
    }

    // Whether elements [i, i + kOptimWidth) of all buffers lie in aligned places.
    template <int kUsed>
    __device__ bool aligned(int64_t i) const {
        bool all = is_aligned<kOptimWidth>(master + i) && is_aligned<kOptimWidth>(grad + i) &&
                   (!kSplit || is_aligned<kOptimWidth>(low + i)) &&
                   (std::is_void_v<Send> || is_aligned<kOptimWidth>(send + i));
#pragma unroll
        for (int s = 0; s < kUsed; ++s) all = all && is_aligned<kOptimWidth>(states[s] + i);
        return all;
    }

    // Updates elements [i, i + kCount); kCount is 1, or kOptimWidth where all of them are aligned.
    template <bool kBranch, int kCount>
    __device__ void update(int64_t i, float scale, const typename Rule::Factors& factors) const {
        constexpr int kUsed = Rule::used(kBranch);
        auto masters = load<kCount>(master + i, true);
        Vector<float, kCount> loaded[Rule::kStates];
#pragma unroll
        for (int s = 0; s < kUsed; ++s) loaded[s] = load<kCount>(states[s] + i, true);
        const auto grads = load<kCount>(grad + i, true);
        Vector<int16_t, kCount> lows;
        if constexpr (kSplit) lows = load<kCount>(low + i, true);
        Vector<Copy, kCount> sends;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            float p, values[Rule::kStates];
            if constexpr (kSplit) {
                p = zshard::join_master({masters.values[k], lows.values[k]});
            } else {
                p = masters.values[k];
            }
#pragma unroll
            for (int s = 0; s < kUsed; ++s) values[s] = loaded[s].values[k];
            Rule::template update<kBranch>(to_float(grads.values[k]) * scale, p, values, factors);
#pragma unroll
            for (int s = 0; s < kUsed; ++s) loaded[s].values[k] = values[s];
            if constexpr (kSplit) {
                const SplitMaster planes = zshard::split_master(p);
                masters.values[k] = planes.hi;
                lows.values[k] = planes.lo;
            } else {
                masters.values[k] = p;
            }
            sends.values[k] = from_float<Copy>(p);
        }
        store(master + i, masters, true);
#pragma unroll
        for (int s = 0; s < kUsed; ++s) store(states[s] + i, loaded[s], true);
        if constexpr (kSplit) store(low + i, lows, true);
        if constexpr (!std::is_void_v<Send>) store(send + i, sends, true);
    }

    template <bool kBranch>
    __device__ void update_run(int64_t numel, float scale,
                               const typename Rule::Factors& factors) const {
        Split split =
            split_run(reinterpret_cast<uint64_t>(master), sizeof(Master), kOptimWidth, numel);
        if (!aligned<Rule::used(kBranch)>(split.head)) split = {numel, 0, 0};
        deal<1>(
            split, kOptimWidth, threadIdx.x, kThreads,
            [&](int64_t i) { update<kBranch, 1>(i, scale, factors); },
            [&](const int64_t (&at)[1], auto) {
                update<kBranch, kOptimWidth>(at[0], scale, factors);
            });
    }
};

template <typename Rule, bool kSplit, typename Grad, typename Send, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    optim_kernel(const __grid_constant__ OptimRows<Rule> rows, Plan<Rule> plan,
                 const __grid_constant__ Shards<Rule, kCapacity> shards) {
    await_predecessor();
    const float scale = rows.grad_scale != nullptr ? *rows.grad_scale : 1.0f;
    const int64_t tiles = plan.first_tile[rows.num_segments];
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t g =
            last_not_after(rows.num_segments, tile, [&](int64_t i) { return plan.first_tile[i]; });
        const Segment segment = rows.segments[g];
        const int64_t item = segment.shard - shards.first;
        if (item < 0 || item >= kCapacity) continue;
        const OptimShard<Rule>& shard = shards.items[item];
        const typename Rule::Factors factors = plan.factors[g];
        const bool branch = Rule::branch(factors);
        // Memory safety, as in the prologue.
        const bool stateless = Rule::used(branch) > 0 && shard.states[0] == nullptr;
        if (segment.end > shard.numel || stateless) __trap();
        const int64_t begin = segment.begin + (tile - plan.first_tile[g]) * kOptimTile;
        const int64_t numel = min(kOptimTile, segment.end - begin);
        const Buffers<Rule, kSplit, Grad, Send> buffers(shard, begin);
        if (branch) {
            buffers.template update_run<true>(numel, scale, factors);
        } else {
            buffers.template update_run<false>(numel, scale, factors);
        }
    }
}

template <typename Rule, bool kSplit, typename Grad, typename Send, int kCapacity>
void launch_shards(const char* op, const OptimArgs<Rule>& args, const Plan<Rule>& plan,
                   size_t first, size_t count, int64_t tiles) {
    Shards<Rule, kCapacity> shards{};
    shards.first = static_cast<int64_t>(first);
    std::copy_n(args.shards.begin() + shards.first, count, shards.items);
    launch(op, Order::kFollowing, optim_kernel<Rule, kSplit, Grad, Send, kCapacity>,
           grid_for(tiles), kThreads, args.rows, plan, shards);
}

template <typename Rule>
void optim_step(const char* op, const OptimArgs<Rule>& args) {
    const int64_t rows = args.rows.num_segments;
    if (rows == 0) return;
    const Scratch scratch(plan_bytes<Rule>(rows));
    const auto num_shards = static_cast<int64_t>(args.shards.size());
    const Plan<Rule> plan = make_plan(op, args.rows, num_shards, -1, scratch);
    // How the segments cut the shards only the device knows: this many tiles at most, the rest of
    // the blocks end at once.
    int64_t tiles = rows;
    for (const OptimShard<Rule>& shard : args.shards) tiles += optim_tiles(shard.numel);
    dispatch_optim(args, [&](auto grad, auto send, auto split) {
        using Grad = decltype(grad);
        using Send = typename decltype(send)::type;
        constexpr bool kSplit = decltype(split)::value;
        constexpr size_t kMany = kManyShards<Rule>;
        for (size_t first = 0; first < args.shards.size(); first += kMany) {
            const size_t count = std::min(kMany, args.shards.size() - first);
            if (count <= kFewShards) {
                launch_shards<Rule, kSplit, Grad, Send, kFewShards>(op, args, plan, first, count,
                                                                    tiles);
            } else {
                launch_shards<Rule, kSplit, Grad, Send, kMany>(op, args, plan, first, count, tiles);
            }
        }
    });
}

}  // namespace zshard::cuda
