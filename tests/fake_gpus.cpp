// Two GPUs that do nothing but tell what they are asked for: each call of what orders streams is a
// line on the standard output. For a process of its own, with a torch built without CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdio>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kCuda = c10::DeviceType::CUDA;
thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, 2> streams{};

void say(const char* what, const Stream& stream) {
    std::printf("%s %d.%d\n", what, stream.device_index(), static_cast<int>(stream.id()));
    std::fflush(stdout);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr auto static_type = kCuda;
    c10::DeviceType type() const override { return kCuda; }
    Device getDevice() const override { return {kCuda, current}; }
    void setDevice(Device device) const override { current = device.index(); }
    void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
    Device exchangeDevice(Device device) const override {
        const Device before = getDevice();
        current = device.index();
        return before;
    }
    Stream getStream(Device device) const override {
        const DeviceIndex index = device.has_index() ? device.index() : current;
        return Stream(Stream::UNSAFE, {kCuda, index}, streams.at(index));
    }
    Stream getDefaultStream(Device device) const override {
        return Stream(Stream::UNSAFE, device, 0);
    }
    Stream getNewStream(Device device, int) const override {
        static c10::StreamId made = 0;
        return Stream(Stream::UNSAFE, device, ++made);
    }
    Stream exchangeStream(Stream stream) const override {
        const Stream before = getStream(stream.device());
        streams.at(stream.device_index()) = stream.id();
        return before;
    }
    DeviceIndex deviceCount() const noexcept override { return 2; }
    void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
        *event = &current;
        say("record", stream);
    }
    void block(void*, const Stream& stream) const override { say("wait", stream); }
    void destroyEvent(void*, DeviceIndex) const noexcept override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    void init() const override {}
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
