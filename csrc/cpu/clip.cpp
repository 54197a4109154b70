#include "ops.h"

namespace zshard::cpu {

void clip_factor(const ClipArgs& args) {
    args.dtype == Dtype::kFloat64 ? args.run<double>() : args.run<float>();
}

}  // namespace zshard::cpu
