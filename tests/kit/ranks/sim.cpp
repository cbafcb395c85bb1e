// A device for the tests, "sim": host memory that only its own kernels may touch, filled with 0xFF when it is given and when it
// is freed. It runs every operator on the CPU, counts copies between host and device, and finishes a non-blocking copy to or from
// pinned memory only when somebody waits for it, or uses what it writes on the device. Its process group moves its own tensors
// alone, as NCCL does. It has no memory left where a test asks for that.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>


#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType SIM = DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 512;  // of CUDA's allocator
std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// ---------------------------------------------------------------------------------------------------------------- memory

std::unordered_map<void*, size_t> given;
std::unordered_map<const char*, size_t> pinned;

int64_t allocations = 0;
int64_t held = 0, peak = 0;  // bytes that are given now, and the most since `reset_peak`
int64_t refuse_from = 0, refuse_until = 0;  // allocations that find no memory left, by their number

void refuse_if_asked(size_t bytes) {
  ++allocations;
  TORCH_CHECK_WITH(OutOfMemoryError, allocations < refuse_from || allocations >= refuse_until,
                   "sim out of memory. Tried to allocate ", bytes, " bytes.");
}

void* take(size_t bytes) {
  void* memory = std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  std::memset(memory, 0xFF, bytes);
  return memory;
}

struct DeviceMemory final : c10::Allocator {
  static void release(void* memory) {
    if (memory == nullptr) return;
    Lock lock(mutex);
    std::memset(memory, 0xFF, given.at(memory));
    held -= given.at(memory);
    given.erase(memory);
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    Device device(SIM, 0);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    Lock lock(mutex);
    refuse_if_asked(bytes);
    void* memory = take(bytes);
    given[memory] = bytes;
    held += bytes;
    peak = std::max(peak, held);
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} device_memory;
REGISTER_ALLOCATOR(SIM, &device_memory);

struct PinnedMemory final : c10::Allocator {
  static void release(void* memory) {
    Lock lock(mutex);
    pinned.erase(static_cast<const char*>(memory));
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    void* memory = take(std::max<size_t>(bytes, 1));
    pinned[static_cast<const char*>(memory)] = std::max<size_t>(bytes, 1);
    return {memory, memory, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_memory;

bool is_pinned(const void* address) {
  Lock lock(mutex);
  auto* at = static_cast<const char*>(address);
  for (auto& [start, bytes] : pinned)
    if (start <= at && at < start + bytes) return true;
  return false;
}

// ------------------------------------------------------------------------------------------- copies between host and device

// Copies of one direction: those that the host waits for, non-blocking ones that it waits for all the same since the memory of
// the host is pageable, and those that run beside it.
struct Copies {
  int64_t blocking = 0, pageable = 0, pinned = 0;
} to_host, to_device;

int64_t reads = 0;  // times the host waited for a value of the device: item(), equal, nonzero
std::atomic<int64_t> syncs{0};  // times the host waited for an event, a stream or the device
thread_local bool is_internal = false;

struct Internal {  // copies of the CPU fallback are no copies of the program
  bool before = is_internal;
  Internal() { is_internal = true; }
  ~Internal() { is_internal = before; }
};

struct Unfinished {
  Tensor to, value;
  int64_t number;
  bool is_upload;
};
std::vector<Unfinished> unfinished;
int64_t launched = 0;

void finish_uploads();

Tensor view_on_host(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

Tensor host(const Tensor& tensor) {
  finish_uploads();
  return view_on_host(tensor);
}

void finish(int64_t until) {
  std::vector<Unfinished> finished;  // released after the lock: that may wait for the GIL, whose owner may wait for the lock
  Lock lock(mutex);
  at::AutoDispatchBelowADInplaceOrView guard;
  size_t done = 0;
  for (; done < unfinished.size() && unfinished[done].number <= until; ++done)
    unfinished[done].to.copy_(unfinished[done].value);
  finished.assign(unfinished.begin(), unfinished.begin() + done);
  unfinished.erase(unfinished.begin(), unfinished.begin() + done);
}

void finish_all() { finish(launched); }

// The device does what is queued in order: before it touches its memory, it has what was copied there.
void finish_uploads() {
  std::vector<Unfinished> rest, uploads;
  Lock lock(mutex);
  at::AutoDispatchBelowADInplaceOrView guard;
  for (auto& each : unfinished) (each.is_upload ? uploads : rest).push_back(each);
  unfinished = std::move(rest);
  for (auto& each : uploads) each.to.copy_(each.value);
}

// What is in pinned memory is read when the copy is done: who changes it before changes what is copied.
void launch_upload(const Tensor& from, const Tensor& to) {
  Lock lock(mutex);
  unfinished.push_back({to, from, ++launched, true});
}

void launch(const Tensor& from, const Tensor& to) {
  Lock lock(mutex);
  at::AutoDispatchBelowADInplaceOrView guard;
  unfinished.push_back({to, from.to(to.scalar_type(), false, true), ++launched, false});
  if (to.is_contiguous()) std::memset(to.data_ptr(), 0xFF, to.nbytes());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  bool is_upload = from.is_cpu() && !to.is_cpu() && !is_internal && non_blocking && is_pinned(from.data_ptr());
  if (is_upload && from.sizes() == to.sizes()) {
    ++to_device.pinned;
    launch_upload(from, view_on_host(to));
    return to;
  }
  Tensor source = from.is_cpu() ? from : host(from), target = to.is_cpu() ? to : host(to);
  if (from.is_cpu() == to.is_cpu() || is_internal) {
    target.copy_(source.expand_as(target));
    return to;
  }
  Copies& copies = to.is_cpu() ? to_host : to_device;
  bool beside = non_blocking && is_pinned((to.is_cpu() ? to : from).data_ptr());
  ++(beside ? copies.pinned : non_blocking ? copies.pageable : copies.blocking);
  if (beside && to.is_cpu()) {
    launch(source.expand_as(target), to);
    return to;
  }
  if (!beside) finish_all();
  target.copy_(source.expand_as(target));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const Tensor& tensor) {
  if (!is_internal) {
    ++reads;
    finish_all();
  }
  return at::native::_local_scalar_dense_cpu(host(tensor));
}

// --------------------------------------------------------------------------------------------------------- streams, hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(DeviceType) {}
  static inline thread_local c10::StreamId current = 0;
  static inline std::atomic<c10::StreamId> last{0};
  DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device) const override { return {SIM, 0}; }
  Device getDevice() const override { return {SIM, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream make(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, {SIM, 0}, id); }
  c10::Stream getStream(Device) const override { return make(current); }
  c10::Stream getDefaultStream(Device) const override { return make(0); }
  c10::Stream getNewStream(Device, int) const override { return make(++last); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = make(current);
    current = stream.id();
    return before;
  }
  // An event is the number of the last copy before it: all streams are one queue.
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(launched + 1);
  }
  static int64_t number(void* event) { return reinterpret_cast<int64_t>(event) - 1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return unfinished.empty() || unfinished[0].number > number(event); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return unfinished.empty(); }
  void synchronizeStream(const c10::Stream&) const override { ++syncs, finish_all(); }
  void synchronizeEvent(void* event) const override { ++syncs, finish(number(event)); }
  void synchronizeDevice(const DeviceIndex) const override { ++syncs, finish_all(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return {SIM, 0}; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    finish_uploads();
    auto* resized = storage.unsafeGetStorageImpl();
    c10::DataPtr memory = device_memory.allocate(bytes);
    if (bytes > 0 && resized->data_ptr().get() != nullptr)
      std::memcpy(memory.get(), resized->data_ptr().get(), std::min(bytes, resized->nbytes()));
    resized->set_data_ptr_noswap(std::move(memory));
    resized->set_nbytes(bytes);
  }
} hooks;

// -------------------------------------------------------------------------------------------------------------- operators

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &device_memory, KEYS, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, KEYS, at::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  at::native::checkSetStorage(tensor, std::move(storage), offset, sizes, strides);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), sizes, strides, false);
  return tensor;
}

// Operators whose result, or its size, the host has to know.
bool is_read_by_host(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::equal", "aten::nonzero", "aten::masked_select",
                                                     "aten::_unique2", "aten::is_nonzero", "aten::bincount"};
  return names.count(name) > 0;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!is_internal && is_read_by_host(op.schema().name())) ++reads;
  Internal internal;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", [](const Tensor& t, IntArrayRef sizes) { return at::native::view(t, sizes); });
  m.impl("_reshape_alias", [](const Tensor& t, IntArrayRef sizes, IntArrayRef strides) {
    return at::native::_reshape_alias(t, sizes, strides);
  });
  m.impl("unfold", [](const Tensor& t, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(t, dim, size, step);
  });
  m.impl("resize_", [](const Tensor& t, IntArrayRef sizes, std::optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(t, sizes, format);
  });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& from) -> Tensor& { return at::native::set_tensor_(t, from); });
  m.impl("set_.source_Storage", [](Tensor& t, at::Storage from) -> Tensor& { return at::native::set_(t, from); });
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
  // `parameter.data = other` exchanges tensors of the device and of the CPU, as it does for CUDA.
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
}

// ---------------------------------------------------------------------------------------------------------- process group

using Works = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

// Gloo over the memory of the device. A tensor of the CPU never gets here: the group has no backend for it.
class Ranks final : public c10d::Backend {
 public:
  explicit Ranks(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "sim"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  Works broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { return with(t, [&](auto& a) { return gloo_->broadcast(a, o); }); }
  Works allreduce(Tensors& t, const c10d::AllreduceOptions& o) override { return with(t, [&](auto& a) { return gloo_->allreduce(a, o); }); }
  Works allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return with(t, [&](auto& a) { return gloo_->allreduce_coalesced(a, o); });
  }
  Works reduce(Tensors& t, const c10d::ReduceOptions& o) override { return with(t, [&](auto& a) { return gloo_->reduce(a, o); }); }
  Works allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto to = hosts(out);
    return with(in, [&](auto& from) { return gloo_->allgather(to, from, o); });
  }
  Works _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto to = checked(out), from = checked(in);
    return gloo_->_allgather_base(to, from, o);
  }
  Works allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto to = hosts(out);
    return with(in, [&](auto& from) { return gloo_->allgather_into_tensor_coalesced(to, from, o); });
  }
  Works gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto to = hosts(out);
    return with(in, [&](auto& from) { return gloo_->gather(to, from, o); });
  }
  Works scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    auto from = hosts(in);
    return with(out, [&](auto& to) { return gloo_->scatter(to, from, o); });
  }
  Works reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    auto from = hosts(in);
    return with(out, [&](auto& to) { return gloo_->reduce_scatter(to, from, o); });
  }
  Works _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto to = checked(out), from = checked(in);
    return gloo_->_reduce_scatter_base(to, from, o);
  }
  Works reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    auto to = hosts(out);
    return with(in, [&](auto& from) { return gloo_->reduce_scatter_tensor_coalesced(to, from, o); });
  }
  Works alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& received, std::vector<int64_t>& sent,
                      const c10d::AllToAllOptions& o) override {
    auto to = checked(out), from = checked(in);
    return gloo_->alltoall_base(to, from, received, sent, o);
  }
  Works send(Tensors& t, int to, int tag) override { return with(t, [&](auto& a) { return gloo_->send(a, to, tag); }); }
  Works recv(Tensors& t, int from, int tag) override { return with(t, [&](auto& a) { return gloo_->recv(a, from, tag); }); }
  Works barrier(const c10d::BarrierOptions& o) override { return gloo_->barrier(o); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  static Tensor checked(const Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == SIM, "No backend type associated with device type ", tensor.device().type());
    return host(tensor);
  }
  static Tensors hosts(const Tensors& tensors) {
    Tensors made;
    for (auto& tensor : tensors) made.push_back(checked(tensor));
    return made;
  }
  static std::vector<Tensors> hosts(const std::vector<Tensors>& lists) {
    std::vector<Tensors> made;
    for (auto& tensors : lists) made.push_back(hosts(tensors));
    return made;
  }
  template <class Call>
  static Works with(const Tensors& tensors, Call call) {
    auto made = hosts(tensors);
    return call(made);
  }
};

// ------------------------------------------------------------------------------------------------------------------ module

// Autograd starts one thread a device at the first backward, once, and what this process was forked from has run one.
struct StartedEngine : torch::autograd::Engine {
  static void add_device() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*(&StartedEngine::device_ready_queues_)).empty()) (engine.*(&StartedEngine::start_device_threads))();
  }
};

pybind11::dict count(const Copies& copies) {
  pybind11::dict made;
  made["blocking"] = copies.blocking;
  made["pageable"] = copies.pageable;
  made["pinned"] = copies.pinned;
  return made;
}

}  // namespace

PYBIND11_MODULE(SIM_MODULE, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("add_to_autograd", &StartedEngine::add_device, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("group", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Ranks>(gloo);
  });
  m.def("synchronize", [] { ++syncs, finish_all(); });
  m.def("unfinished", [] { return unfinished.size(); });
  m.def("counts", [] {
    pybind11::dict made;
    made["to_host"] = count(to_host);
    made["to_device"] = count(to_device);
    made["reads"] = reads;
    made["syncs"] = syncs.load();
    return made;
  });
  m.def("refuse", [](int64_t from, int64_t until) { allocations = 0, refuse_from = from, refuse_until = until; });
  m.def("allocations", [] { return allocations; });
  m.def("held", [] { return held; });
  m.def("peak", [] { return peak; });
  m.def("reset_peak", [] { peak = held; });
  m.def("reset", [] { to_host = to_device = Copies(), reads = 0, syncs = 0; });
}
