#include <algorithm>
#include <vector>

#include "cpu/convert.h"
#include "ops.h"

namespace zshard::cpu {

namespace {

template <typename To, typename From>
void cast_typed(const CastArgs& args) {
    auto* out = static_cast<To*>(args.out);
    const int64_t numel = args.numel;
    std::vector<int64_t> ranks;  // that are not in place, so that every thread has work
    for (int64_t rank = 0; rank < args.src.count; ++rank)
        if (args.src.row<From>(rank) != nullptr) ranks.push_back(rank);
    const int64_t moved = static_cast<int64_t>(ranks.size()) * numel;
    const bool stream = moved * int64_t{sizeof(To)} >= kStreamBytes;
    parallel(moved, kGrain, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t rank = ranks[begin / numel], at = begin % numel;
            const int64_t count = std::min(end - begin, numel - at);
            convert_run(out + rank * numel + at, args.src.row<From>(rank) + at, count,
                        Wide<From>{1}, stream);
            begin += count;
        }
        stream_fence();
    });
}

}  // namespace

void cast(const CastArgs& args) {
    dispatch_cast(args.out_dtype, args.src.dtype,
                  [&](auto to, auto from) { cast_typed<decltype(to), decltype(from)>(args); });
}

void split_master(const MasterArgs& args) {
    parallel(args.numel, kGrain, [&](int64_t begin, int64_t end) {
        vectorised([begin, end, full = args.full, hi = args.hi, lo = args.lo](auto) {
            each(begin, end, [=](int64_t i) {
                const SplitMaster planes = zshard::split_master(full[i]);
                hi[i] = planes.hi;
                lo[i] = planes.lo;
            });
        });
    });
}

void join_master(const MasterArgs& args) {
    parallel(args.numel, kGrain, [&](int64_t begin, int64_t end) {
        vectorised([begin, end, full = args.full, hi = args.hi, lo = args.lo](auto) {
            each(begin, end, [=](int64_t i) { full[i] = zshard::join_master({hi[i], lo[i]}); });
        });
    });
}

}  // namespace zshard::cpu
