#include "cuda/launch.h"
#include "ops.h"

namespace zshard::cuda {

namespace {

template <typename T>
__global__ void clip_kernel(ClipArgs args) {
    args.run<T>();
}

}  // namespace

void clip_factor(const ClipArgs& args) {
    const bool wide = args.dtype == Dtype::kFloat64;
    launch("clip_factor_", wide ? clip_kernel<double> : clip_kernel<float>, 1, 1, args);
}

}  // namespace zshard::cuda
