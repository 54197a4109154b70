// csrc/index.h: every element is visited exactly once, at every size, alignment and thread count,
// and every vector lies in an aligned place.
#include "index.h"

#include <cstdint>
#include <vector>

#include "check.h"

namespace zshard {
namespace {

using test::check;
using test::check_equal;
using test::where;

// What a block's threads do with `numel` elements of `size` bytes that start at `address`.
template <int kUnroll>
void check_visits(uint64_t address, int64_t size, int64_t width, int64_t numel, int64_t threads) {
    const auto at = where("address", address, "size", size, "width", width, "numel", numel,
                          "threads", threads, "unroll", kUnroll);
    const Split split = split_run(address, size, width, numel);
    check_equal(split.head + split.vectors * width + split.tail, numel, at);
    check(split.head < width && split.tail < width, "head and tail are shorter than a vector", at);
    check(split.head >= 0 && split.vectors >= 0 && split.tail >= 0, "no count is negative", at);

    std::vector<int> visits(numel, 0);
    const auto visit = [&](int64_t i) {
        check(i >= 0 && i < numel, "an index is inside the run", at);
        ++visits[i];
    };
    for (int64_t thread = 0; thread < threads; ++thread) {
        deal<kUnroll>(split, width, thread, threads, visit,
                      [&](const int64_t (&starts)[kUnroll], auto count) {
                          for (int u = 0; u < count; ++u) {
                              const uint64_t place = address + starts[u] * size;
                              check_equal(place % (size * width), uint64_t{0}, at);
                              for (int64_t k = 0; k < width; ++k) visit(starts[u] + k);
                          }
                      });
    }
    for (int64_t i = 0; i < numel; ++i) check_equal(visits[i], 1, at);
}

void check_every_size_and_alignment() {
    for (const int64_t size : {2, 4, 8}) {
        for (int64_t width = 1; width * size <= 16; width *= 2) {
            for (int64_t shift = 0; shift < 16 / size; ++shift) {
                for (int64_t numel = 0; numel < 70; ++numel) {
                    for (const int64_t threads : {1, 2, 3, 8}) {
                        check_visits<1>(4096 + shift * size, size, width, numel, threads);
                        check_visits<4>(4096 + shift * size, size, width, numel, threads);
                    }
                }
                for (const int64_t numel : {4095, 4096, 8191, 8192})
                    check_visits<4>(4096 + shift * size, size, width, numel, 256);
            }
        }
    }
}

// Beyond 2^31 the counts still add up.
void check_large() {
    const int64_t numel = (int64_t{1} << 40) + 5;
    const Split split = split_run(4098, 2, 8, numel);
    check_equal(split.head, 7);
    check_equal(split.vectors, (numel - 7) / 8);
    check_equal(split.tail, (numel - 7) % 8);
}

// The segment of each tile, empty segments among them.
void check_search() {
    for (int pattern = 0; pattern < 81; ++pattern) {
        std::vector<int64_t> starts;
        std::vector<int> owner;
        for (int i = 0, rest = pattern; i < 4; ++i, rest /= 3) {
            starts.push_back(static_cast<int64_t>(owner.size()));
            owner.insert(owner.end(), rest % 3, i);
        }
        for (size_t tile = 0; tile < owner.size(); ++tile) {
            const int found =
                last_not_after(4, static_cast<int64_t>(tile), [&](int i) { return starts[i]; });
            check_equal(found, owner[tile], where("pattern", pattern, "tile", tile));
        }
    }
}

}  // namespace
}  // namespace zshard

int main() {
    zshard::check_every_size_and_alignment();
    zshard::check_large();
    zshard::check_search();
}
