#include "cuda/optim.cuh"

namespace zshard::cuda {

void sgd(const OptimArgs<Sgd>& args) { optim_step("sgd_", args); }

}  // namespace zshard::cuda
