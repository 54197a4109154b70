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
double square_sum(const T* x) {
    constexpr int kRow = kSquareColumns * kSquareGroup;
    static_assert(kSquareRows == 4 && kSquareGroup == 4);
    alignas(64) double sums[kRow];
    vectorised([&sums, x] {
        const auto square = [x](int64_t i) {
            return static_cast<double>(x[i]) * static_cast<double>(x[i]);
        };
        each(0, kRow, [&](int64_t i) {
            sums[i] =
                ((square(i) + square(kRow + i)) + square(2 * kRow + i)) + square(3 * kRow + i);
        });
        for (int c = 0; c < kSquareColumns; ++c) {
            const double* g = sums + c * kSquareGroup;
            sums[c] = (g[0] + g[2]) + (g[1] + g[3]);
        }
        for (int half = kSquareColumns / 2; half > 0; half /= 2)
            each(0, half, [&](int64_t i) { sums[i] += sums[half + i]; });
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

// A block of at most kSquareBlock elements on its way, in the first-level cache.
template <typename Acc>
struct Block {
    alignas(64) Wide<Acc> wide[kSquareBlock];  // sums so far; in the end the stored values
    alignas(64) Acc stored[kSquareBlock];      // on its way around the cache
};

// The last one or two chunks, the scale and the store in one loop: for two ranks this is all there
// is, and the processor reads all of its streams at once.
template <typename Acc, typename Chunk, int kChunks, bool kSummed, bool kAccumulate>
void finish_block(Block<Acc>& block, const Chunk* last, int64_t stride, const Acc* before, Acc* out,
                  int64_t count, Wide<Acc> scale) {
    using W = Wide<Acc>;
    vectorised([=, wide = block.wide] {
        each(0, count, [=](int64_t i) {
            W sum = kSummed ? wide[i] + convert<W>(last[i]) : convert<W>(last[i]);
            if constexpr (kChunks == 2) sum += convert<W>(last[stride + i]);
            sum *= scale;
            const Acc value = convert<Acc>(kAccumulate ? convert<W>(before[i]) + sum : sum);
            out[i] = value;
            wide[i] = convert<W>(value);
        });
    });
}

// Elements [begin, begin + count). Leaves the stored values, widened, in block.wide.
template <typename Acc, typename Chunk>
void reduce_block(const ReduceArgs& args, int64_t begin, int64_t count, bool stream,
                  Block<Acc>& block) {
    using W = Wide<Acc>;
    const auto* chunks = static_cast<const Chunk*>(args.chunks) + begin;
    auto* acc = static_cast<Acc*>(args.acc) + begin;
    const int64_t stride = args.chunk_stride;
    const int64_t early = args.world_size - 2;
    if (early > 0) {
        vectorised([=, wide = block.wide] {
            each(0, count, [=](int64_t i) { wide[i] = convert<W>(chunks[i]); });
            for (int64_t rank = 1; rank < early; ++rank)
                each(0, count, [=, chunk = chunks + rank * stride](int64_t i) {
                    wide[i] += convert<W>(chunk[i]);
                });
        });
    }
    const auto finish = [&](auto kChunks, auto kSummed, auto kAccumulate) {
        const Chunk* last = chunks + (args.world_size - kChunks) * stride;
        finish_block<Acc, Chunk, kChunks, kSummed, kAccumulate>(block, last, stride, acc,
                                                                stream ? block.stored : acc, count,
                                                                static_cast<W>(args.scale));
    };
    const auto finish_as = [&](auto kAccumulate) {
        using One = std::integral_constant<int, 1>;
        using Two = std::integral_constant<int, 2>;
        if (early > 0) return finish(Two{}, std::true_type{}, kAccumulate);
        if (early == 0) return finish(Two{}, std::false_type{}, kAccumulate);
        finish(One{}, std::false_type{}, kAccumulate);
    };
    args.accumulate ? finish_as(std::true_type{}) : finish_as(std::false_type{});
    if (stream) stream_copy(acc, block.stored, count * int64_t{sizeof(Acc)});
}

template <typename Acc, typename Chunk>
void reduce_typed(const ReduceArgs& args) {
    using W = Wide<Acc>;
    const int64_t blocks = (args.numel + kSquareBlock - 1) / kSquareBlock;
    // Accumulating reads acc anyway.
    const bool stream = !args.accumulate && args.numel * int64_t{sizeof(Acc)} >= kStreamBytes;
    std::vector<double> sums(args.stats != nullptr ? blocks : 0);
    std::vector<uint8_t> bad(sums.size());
    parallel(blocks, kGrain / kSquareBlock, [&](int64_t first, int64_t last) {
        Block<Acc> block;
        for (int64_t b = first; b < last; ++b) {
            const int64_t count = std::min<int64_t>(kSquareBlock, args.numel - b * kSquareBlock);
            reduce_block<Acc, Chunk>(args, b * kSquareBlock, count, stream, block);
            if (args.stats == nullptr) continue;
            std::fill(block.wide + count, block.wide + kSquareBlock, W{0});
            sums[b] = square_sum(block.wide);
            bad[b] = !std::isfinite(sums[b]);
            // A float's square cannot overflow a double, but a double's can.
            if (std::is_same_v<W, double> && bad[b] != 0)
                bad[b] = !std::all_of(block.wide, block.wide + count,
                                      [](W x) { return std::isfinite(x); });
        }
        stream_fence();
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
