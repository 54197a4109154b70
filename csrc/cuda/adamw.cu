#include "cuda/optim.cuh"

namespace zshard::cuda {

void adamw(const OptimArgs<Adamw>& args) { optim_step("adamw_", args); }

}  // namespace zshard::cuda
