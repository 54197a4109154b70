// Where the segments of a unit lie in its flat buffer, and which part of them a rank's shard holds.
//
//   |<- segment 0 ->|pad|<- segment 1 ->|pad| ... |<- last ->|     padding     |
//   0               offsets[1]                     total                       N * shard_size
//
// All counts are elements. The arithmetic is constexpr, hence callable from kernels as well.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace zshard {

// Segments and shards start at multiples of this many elements: 64 bytes of bf16, a whole number
// of 16-byte accesses in every dtype, and a cache line of any two ranks is never shared.
inline constexpr int64_t kAlign = 32;

// Far above any memory, far enough below 2^63 that sums and products of layout terms cannot wrap.
inline constexpr int64_t kMaxElements = int64_t{1} << 56;

constexpr int64_t align_up(int64_t count, int64_t alignment) {
    return (count + alignment - 1) / alignment * alignment;
}

// Elements [begin, end) of a flat buffer.
struct Range {
    int64_t begin;
    int64_t end;  // >= begin

    constexpr int64_t numel() const { return end - begin; }
    constexpr bool operator==(const Range&) const = default;
};

// The elements in both ranges. Where there are none, an empty range that lies inside `a`.
constexpr Range intersect(Range a, Range b) {
    const int64_t low = b.begin < a.begin ? a.begin : (b.begin < a.end ? b.begin : a.end);
    const int64_t high = b.end < a.end ? b.end : a.end;
    return {low, high < low ? low : high};
}

// The elements that `rank` holds of a buffer cut into shards of `shard_size`.
constexpr Range shard_range(int64_t rank, int64_t shard_size) {
    return {rank * shard_size, (rank + 1) * shard_size};
}

// Elements a rank holds of `total`: the same on every rank, so the last shards may be padding.
constexpr int64_t shard_size_of(int64_t total, int64_t world_size) {
    return align_up((total + world_size - 1) / world_size, kAlign);
}

struct FlatLayout {
    std::vector<int64_t> offsets;  // one a segment, multiples of kAlign, ascending
    std::vector<int64_t> numels;   // one a segment
    int64_t world_size;
    int64_t total;       // end of the last segment
    int64_t shard_size;  // a multiple of kAlign; world_size * shard_size >= total

    // The part of a segment that a rank's shard holds, in flat coordinates.
    Range intersection(int64_t segment, int64_t rank) const {
        const int64_t count = static_cast<int64_t>(numels.size());
        if (segment < 0 || segment >= count) {
            throw std::invalid_argument("segment " + std::to_string(segment) + " is not in [0, " +
                                        std::to_string(count) + ")");
        }
        if (rank < 0 || rank >= world_size) {
            throw std::invalid_argument("rank " + std::to_string(rank) + " is not in [0, " +
                                        std::to_string(world_size) + ")");
        }
        const int64_t begin = offsets[segment];
        return intersect({begin, begin + numels[segment]}, shard_range(rank, shard_size));
    }
};

// Lays segments of `numels` elements one after the other. Throws std::invalid_argument.
inline FlatLayout flat_layout(std::vector<int64_t> numels, int64_t world_size) {
    if (world_size < 1 || world_size > kMaxElements / kAlign) {
        throw std::invalid_argument("world_size " + std::to_string(world_size) +
                                    " is not in [1, 2^51]: pass the number of ranks that shard");
    }
    FlatLayout layout{{}, std::move(numels), world_size, 0, 0};
    layout.offsets.reserve(layout.numels.size());
    for (const int64_t numel : layout.numels) {
        const int64_t offset = align_up(layout.total, kAlign);
        if (numel < 0 || numel > kMaxElements - offset) {
            throw std::invalid_argument(
                "segment " + std::to_string(layout.offsets.size()) + " has " +
                std::to_string(numel) + " elements at offset " + std::to_string(offset) +
                ": a flat buffer holds segments of 0 elements or more, 2^56 in all");
        }
        layout.offsets.push_back(offset);
        layout.total = offset + numel;
    }
    layout.shard_size = shard_size_of(layout.total, world_size);
    return layout;
}

}  // namespace zshard
