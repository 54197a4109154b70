#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "ops.h"

namespace zshard::cpu {

namespace {

// A block's sum of squares in the order of [Note: sum of squares].
template <typename T>
double square_sum(const T* __restrict x) {
    constexpr int kRow = kSquareColumns * kSquareGroup;
    static_assert(kSquareRows == 2 && kSquareGroup == 8);
    alignas(64) double sums[kRow];
    vectorised([&sums, x] {
        for (int i = 0; i < kRow; ++i) {
            const double upper = x[i], lower = x[kRow + i];
            sums[i] = upper * upper + lower * lower;
        }
        for (int c = 0; c < kSquareColumns; ++c) {
            const double* g = sums + c * kSquareGroup;
            sums[c] = ((g[0] + g[4]) + (g[2] + g[6])) + ((g[1] + g[5]) + (g[3] + g[7]));
        }
        for (int half = kSquareColumns / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) sums[i] += sums[half + i];
    });
    return sums[0];
}

// The blocks' sums in the order of [Note: sum of squares].
double lane_sum(const std::vector<double>& blocks) {
    double lanes[kSquareLanes] = {};
    for (size_t i = 0; i < blocks.size(); ++i) lanes[i % kSquareLanes] += blocks[i];
    for (int half = kSquareLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[half + i];
    return lanes[0];
}

// One block: `count` <= kSquareBlock elements from `begin` on. Leaves the stored values, widened,
// in `wide`.
template <typename Acc, typename Chunk>
void reduce_block(const ReduceArgs& args, int64_t begin, int64_t count,
                  Wide<Acc>* __restrict wide) {
    using W = Wide<Acc>;
    const auto* __restrict chunks = static_cast<const Chunk*>(args.chunks) + begin;
    auto* __restrict acc = static_cast<Acc*>(args.acc) + begin;
    const W scale = static_cast<W>(args.scale);
    vectorised([=, world_size = args.world_size, stride = args.chunk_stride,
                accumulate = args.accumulate] {
        for (int64_t i = 0; i < count; ++i) wide[i] = convert<W>(chunks[i]);
        for (int64_t rank = 1; rank < world_size; ++rank) {
            const Chunk* __restrict chunk = chunks + rank * stride;
            for (int64_t i = 0; i < count; ++i) wide[i] += convert<W>(chunk[i]);
        }
        if (accumulate) {
            for (int64_t i = 0; i < count; ++i) {
                acc[i] = convert<Acc>(convert<W>(acc[i]) + wide[i] * scale);
                wide[i] = convert<W>(acc[i]);
            }
        } else {
            for (int64_t i = 0; i < count; ++i) {
                acc[i] = convert<Acc>(wide[i] * scale);
                wide[i] = convert<W>(acc[i]);
            }
        }
    });
}

template <typename Acc, typename Chunk>
void reduce_typed(const ReduceArgs& args) {
    using W = Wide<Acc>;
    const int64_t blocks = (args.numel + kSquareBlock - 1) / kSquareBlock;
    std::vector<double> sums(args.stats != nullptr ? blocks : 0);
    std::vector<uint8_t> bad(sums.size());
    parallel(blocks, kGrain / kSquareBlock, [&](int64_t first, int64_t last) {
        alignas(64) W wide[kSquareBlock];
        for (int64_t b = first; b < last; ++b) {
            const int64_t count = std::min<int64_t>(kSquareBlock, args.numel - b * kSquareBlock);
            reduce_block<Acc, Chunk>(args, b * kSquareBlock, count, wide);
            if (args.stats == nullptr) continue;
            std::fill(wide + count, wide + kSquareBlock, W{0});
            sums[b] = square_sum(wide);
            bad[b] = !std::isfinite(sums[b]);
            // A float's square cannot overflow a double, but a double's can.
            if (std::is_same_v<W, double> && bad[b] != 0)
                bad[b] = !std::all_of(wide, wide + count, [](W x) { return std::isfinite(x); });
        }
    });
    if (args.stats == nullptr) return;
    args.stats[0] = lane_sum(sums);
    args.stats[1] =
        std::any_of(bad.begin(), bad.end(), [](uint8_t b) { return b != 0; }) ? 1.0 : 0.0;
}

}  // namespace

void reduce(const ReduceArgs& args) {
    if (args.acc_dtype == Dtype::kFloat64) return reduce_typed<double, double>(args);
    dispatch(args.acc_dtype, [&](auto acc) {
        dispatch(args.chunk_dtype,
                 [&](auto chunk) { reduce_typed<decltype(acc), decltype(chunk)>(args); });
    });
}

}  // namespace zshard::cpu
