// csrc/layout.h: every layout's invariants over many sizes, and the refusals.
#include "layout.h"

#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"

namespace zshard {
namespace {

using test::check;
using test::check_equal;
using test::check_throws;
using test::where;

// Segments neither overlap nor leave their alignment; the ranks' shards hold each element once.
void check_layout(const std::vector<int64_t>& numels, int64_t world_size) {
    const FlatLayout layout = flat_layout(numels, world_size);
    check_equal(layout.offsets.size(), numels.size());
    check_equal(layout.shard_size % kAlign, 0);
    check(layout.shard_size * world_size >= layout.total, "the shards hold every element",
          where("world_size", world_size, "total", layout.total));
    check(layout.shard_size * world_size < layout.total + world_size * kAlign,
          "padding stays below one alignment a rank",
          where("world_size", world_size, "total", layout.total));

    int64_t end = 0;
    for (size_t i = 0; i < numels.size(); ++i) {
        const auto at = where("segment", i, "of", numels.size(), "world_size", world_size);
        check_equal(layout.offsets[i], align_up(end, kAlign), at);
        int64_t next = layout.offsets[i];
        for (int64_t rank = 0; rank < world_size; ++rank) {
            const Range held = layout.intersection(static_cast<int64_t>(i), rank);
            check(held.numel() >= 0, "a range is not negative", at);
            if (held.numel() == 0) {
                continue;
            }
            const Range shard = shard_range(rank, layout.shard_size);
            check(held.begin >= shard.begin && held.end <= shard.end, "held lies in the shard", at);
            check_equal(held.begin, next, at);
            next = held.end;
        }
        end = layout.offsets[i] + numels[i];
        check_equal(next, end, at);
    }
    check_equal(layout.total, end);
}

void test_many_layouts() {
    const std::vector<int64_t> edges = {0, 1, 31, 32, 33, 63, 64, 65, 1000};
    for (int64_t world_size = 1; world_size <= 9; ++world_size) {
        check_layout({}, world_size);
        for (const int64_t first : edges) {
            check_layout({first}, world_size);
            for (const int64_t second : edges) {
                check_layout({first, second, 7}, world_size);
            }
        }
    }
    std::mt19937_64 random(1);
    for (int round = 0; round < 2000; ++round) {
        std::vector<int64_t> numels(random() % 12);
        for (int64_t& numel : numels) {
            numel = static_cast<int64_t>(random() >> (44 + random() % 20));
        }
        check_layout(numels, 1 + static_cast<int64_t>(random() % 70));
    }
}

void test_known_layout() {
    const FlatLayout layout = flat_layout({5, 64, 0, 3}, 2);
    check(layout.offsets == std::vector<int64_t>{0, 32, 96, 96}, "the offsets are 0, 32, 96, 96");
    check_equal(layout.total, 99);
    check_equal(layout.shard_size, 64);
    check(layout.intersection(1, 0) == Range{32, 64}, "rank 0 holds half of segment 1");
    check(layout.intersection(1, 1) == Range{64, 96}, "rank 1 holds the other half");
    check(layout.intersection(3, 0).numel() == 0, "rank 0 holds nothing of the last segment");
}

void test_intersect() {
    for (int64_t a = 0; a < 5; ++a) {
        for (int64_t b = a; b < 5; ++b) {
            for (int64_t c = 0; c < 5; ++c) {
                for (int64_t d = c; d < 5; ++d) {
                    const auto at = where("[", a, b, ") [", c, d, ")");
                    const Range both = intersect({a, b}, {c, d});
                    check(both.begin >= a && both.end <= b && both.numel() >= 0,
                          "the intersection lies in the first range", at);
                    for (int64_t i = 0; i < 5; ++i) {
                        const bool expected = i >= a && i < b && i >= c && i < d;
                        check_equal(i >= both.begin && i < both.end, expected, at);
                    }
                }
            }
        }
    }
}

void test_refusals() {
    using Bad = std::invalid_argument;
    check_throws<Bad>([] { flat_layout({1}, 0); }, "world_size 0");
    check_throws<Bad>([] { flat_layout({1}, INT64_MAX); }, "world_size 9223372036854775807");
    check_throws<Bad>([] { flat_layout({1, -2}, 1); }, "segment 1 has -2 elements at offset 32");
    check_throws<Bad>([] { flat_layout({kMaxElements, 1}, 1); }, "segment 1 has 1 elements");
    check_throws<Bad>([] { flat_layout({INT64_MAX}, 1); }, "segment 0");
    check_throws<Bad>([] { flat_layout({1}, 1).intersection(1, 0); }, "segment 1 is not in [0, 1)");
    check_throws<Bad>([] { flat_layout({1}, 1).intersection(-1, 0); }, "segment -1");
    check_throws<Bad>([] { flat_layout({1}, 2).intersection(0, 2); }, "rank 2 is not in [0, 2)");
    check_throws<Bad>([] { flat_layout({1}, 2).intersection(0, -1); }, "rank -1");
}

}  // namespace
}  // namespace zshard

int main() {
    zshard::test_known_layout();
    zshard::test_many_layouts();
    zshard::test_intersect();
    zshard::test_refusals();
}
