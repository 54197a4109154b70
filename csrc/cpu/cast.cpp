#include "cpu/convert.h"
#include "ops.h"

namespace zshard::cpu {

namespace {

template <typename To, typename From>
void cast_typed(const CastArgs& args) {
    auto* out = static_cast<To*>(args.out);
    const auto* src = static_cast<const From*>(args.src);
    const bool stream = args.numel * int64_t{sizeof(To)} >= kStreamBytes;
    parallel(args.numel, kGrain, [=](int64_t begin, int64_t end) {
        convert_run(out + begin, src + begin, end - begin, Wide<From>{1}, stream);
        stream_fence();
    });
}

}  // namespace

void cast(const CastArgs& args) {
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
    parallel(args.numel, kGrain, [&](int64_t begin, int64_t end) {
        vectorised([begin, end, full = args.full, hi = args.hi, lo = args.lo] {
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
        vectorised([begin, end, full = args.full, hi = args.hi, lo = args.lo] {
            each(begin, end, [=](int64_t i) { full[i] = zshard::join_master({hi[i], lo[i]}); });
        });
    });
}

}  // namespace zshard::cpu
