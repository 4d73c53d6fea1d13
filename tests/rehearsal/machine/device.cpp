// A pretended CUDA device. Its memory is the host's and its kernels are the CPU's, but it is as strict as CUDA is about
// where tensors are:
// - an operator whose tensors are on two devices fails, with the exceptions that CUDA makes;
// - fresh memory is garbage, and so is freed memory;
// - a copy to pinned memory that does not block arrives with the next synchronisation, and not before.
// It counts what it is asked for (Counts).
// The library registers itself. It has to be loaded before torch is imported, which looks for CUDA only once. It needs
// all of torch's libraries, so that it registers after them: in a torch that was built with CUDA, its guard, its
// allocator and its operators replace theirs.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorShape.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

using at::Tensor;

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
constexpr int GARBAGE = 0x7f;  // 3.4e38 as a float, in any of the types

// --- counts ------------------------------------------------------------------------------------------------------

struct Counts {
  int64_t launches, synchronizations, bytes_to_device, bytes_to_host, allocated, peak;
};
Counts counts{};
std::map<std::string, int64_t> operators;  // launches and synchronisations by name; "sync: " before the latter
// Above 0 within one kernel: an operator's, which this device computes with several of the CPU's, or what
// pretended_cuda.kernel says. What happens in it is not counted again.
thread_local int in_kernel = 0;

void count_launch(const std::string& name) {
  if (in_kernel) return;
  ++counts.launches;
  ++operators[name];
}

void count_synchronization(const std::string& name) {
  if (in_kernel) return;
  ++counts.synchronizations;
  ++operators["sync: " + name];
}

// Memory that a kernel takes and returns is not the program's: the peak does not see it.
void count_memory(int64_t bytes) {
  counts.allocated += bytes;
  if (!in_kernel && counts.allocated > counts.peak) counts.peak = counts.allocated;
}

void end_kernel() {
  --in_kernel;
  count_memory(0);
}

struct Kernel {
  Kernel() { ++in_kernel; }
  ~Kernel() { end_kernel(); }
};

// --- memory ------------------------------------------------------------------------------------------------------

// As many bytes before each block hold its size, so that freed memory can be filled.
constexpr size_t ALIGNMENT = 64;

void* new_block(size_t bytes) {
  auto* begin = static_cast<char*>(aligned_alloc(ALIGNMENT, (bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT));
  TORCH_CHECK(begin, "pretended CUDA: out of memory");
  *reinterpret_cast<size_t*>(begin) = bytes;
  memset(begin + ALIGNMENT, GARBAGE, bytes);
  return begin + ALIGNMENT;
}

void free_block(void* block) {
  auto* begin = static_cast<char*>(block) - ALIGNMENT;
  memset(block, GARBAGE, *reinterpret_cast<size_t*>(begin));
  free(begin);
}

void free_on_device(void* block) {
  count_memory(-static_cast<int64_t>(*reinterpret_cast<size_t*>(static_cast<char*>(block) - ALIGNMENT)));
  free_block(block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes ? new_block(bytes) : nullptr;
    count_memory(bytes);
    return {block, block, bytes ? &free_on_device : &c10::detail::deleteNothing, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
DeviceAllocator device_allocator;

std::recursive_mutex lock;
std::map<const char*, size_t> pinned;  // the blocks of host memory that are pinned

void free_pinned(void* block) {
  {
    std::lock_guard<std::recursive_mutex> held(lock);
    pinned.erase(static_cast<const char*>(block));
  }
  free_block(block);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  auto [begin, bytes] = *--after;
  return pointer < begin + bytes;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = new_block(bytes);
    std::lock_guard<std::recursive_mutex> held(lock);
    pinned[static_cast<const char*>(block)] = bytes ? bytes : 1;
    return {block, block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

// --- copies ------------------------------------------------------------------------------------------------------

// The same memory as a CPU tensor.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  auto all = at::from_blob(
      const_cast<void*>(storage.data()), {static_cast<int64_t>(storage.nbytes() / tensor.element_size())},
      at::TensorOptions().dtype(tensor.dtype()));
  auto seen = all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return tensor.is_conj() ? seen.conj() : seen;
}

struct Transfer {
  Tensor to, from;  // pinned memory, and what the device's memory held when the copy was asked for
};
std::vector<Transfer> transfers;  // that the host has not waited for

void copy_now(const Tensor& to, const Tensor& from) {
  c10::InferenceMode usual(false);
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor target = on_cpu(to);
  at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), target, on_cpu(from), false);
}

void synchronize() {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto arrived = std::move(transfers);
  transfers.clear();
  for (const auto& transfer : arrived) copy_now(transfer.to, transfer.from);
}

// Between the device and memory that is not pinned, or where the caller asks to wait, the host waits for all that the
// device has yet to do.
void count_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (in_kernel) return;
  if (to.is_cuda() && from.is_cuda()) return count_launch("aten::copy_");
  (to.is_cuda() ? counts.bytes_to_device : counts.bytes_to_host) += static_cast<int64_t>(from.nbytes());
  const bool on_pinned = is_pinned((to.is_cuda() ? from : to).storage().data());
  if (!non_blocking || !on_pinned) count_synchronization(to.is_cuda() ? "copy to the device" : "copy to the host");
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.numel() == 0 && from.numel() == 0) return self;
  TORCH_CHECK(!self._is_zerotensor(), "pretended CUDA: copy_ into a tensor of zeros without memory");
  const bool to_host = from.is_cuda() && !self.is_cuda();
  count_copy(self, from, non_blocking);
  if (to_host && non_blocking && is_pinned(self.storage().data()) && !self.is_conj()) {
    std::lock_guard<std::recursive_mutex> held(lock);
    c10::InferenceMode usual(false);
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor then = on_cpu(from).clone();
    if (self.is_contiguous()) memset(self.data_ptr(), GARBAGE, self.nbytes());
    transfers.push_back({self, then});
    return self;
  }
  // What reads or writes the host's memory comes after earlier transfers. A kernel's own copies (run_on_cpu) do not
  // exist on a GPU.
  if (!in_kernel && (to_host || !from.is_cuda())) synchronize();
  copy_now(self, from);
  return self;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  count_synchronization("item");
  if (!in_kernel) counts.bytes_to_host += static_cast<int64_t>(tensor.nbytes());
  synchronize();
  return at::_ops::_local_scalar_dense::call(on_cpu(tensor));
}

void synchronize_on_request() {
  count_synchronization("synchronize");
  synchronize();
}

// --- what torch asks of a device ----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceType type() const override { return DEVICE.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override { synchronize_on_request(); }
  void synchronizeStream(const c10::Stream&) const override { synchronize_on_request(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_on_request(); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {

struct PretendedHooks final : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  const Generator& getDefaultGenerator(c10::DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronize_on_request(); }
};

// Torch's own two of this name say that there is no CUDA, in a torch built without. The loader finds these first, since
// it loads torch's libraries as this one's dependencies.
const CUDAHooksInterface& detail::getCUDAHooks() {
  static PretendedHooks hooks;
  return hooks;
}
std::optional<c10::DeviceType> accelerator::getAccelerator(bool) { return DEVICE.type(); }

}  // namespace at

namespace {

// --- operators ----------------------------------------------------------------------------------------------------

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(
    Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// What CUDA accepts of CPU tensors: numbers (no dimension) that are only read, and indices.
class Devices {
 public:
  explicit Devices(const c10::OperatorHandle& op) : name_(c10::toString(op.operator_name())), schema_(op.schema()) {}

  void check(c10::ArrayRef<c10::IValue> arguments) {
    for (size_t place = 0; place < arguments.size(); ++place) {
      const auto& value = arguments[place];
      const auto& declared = schema_.arguments()[place];
      const bool written = declared.alias_info() && declared.alias_info()->isWrite();
      if (value.isTensor()) look(value.toTensor(), place, written);
      else if (value.isTensorList()) for (const Tensor& each : value.toTensorList()) look(each, place, written);
      else if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& each : value.toOptionalTensorList())
          if (each && !is_index(*each)) look(*each, place, written);
      } else if (value.isGenerator()) generator(value.toGenerator());
    }
    TORCH_CHECK(
        !cuda_ || on_cpu_.empty(), "Expected all tensors to be on the same device, but found at least two devices, ",
        "cuda:0 and cpu! (pretended CUDA: ", name_, " got CPU tensors:", on_cpu_, ")");
    TORCH_CHECK(
        !cuda_ || !cpu_generator_, "Expected a 'cuda' device type for generator but found 'cpu' (pretended CUDA: ",
        name_, ")");
  }

 private:
  void look(const Tensor& tensor, size_t place, bool written) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) cuda_ = true;
    else if (tensor.is_cpu() && (tensor.dim() > 0 || written || name_ == "aten::cat"))
      on_cpu_ += c10::str(" ", schema_.arguments()[place].name(), " of size ", tensor.sizes());
  }

  // Indices may be on the CPU, whatever they index; those on the device index only what is there.
  bool is_index(const Tensor& tensor) {
    if (name_.rfind("aten::index", 0) != 0 && name_.rfind("aten::_index_put", 0) != 0) return false;
    if (tensor.defined() && tensor.is_cuda()) cuda_ = true;
    return true;
  }

  void generator(const at::Generator& generator) {
    if (generator.defined() && generator.device().is_cpu()) cpu_generator_ = true;
  }

  std::string name_;
  const c10::FunctionSchema& schema_;
  bool cuda_ = false, cpu_generator_ = false;
  std::string on_cpu_;
};

// Operators whose results have a size that the data decide, or a value that the host gets.
const std::set<std::string> WAIT_FOR_DATA = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::bincount",
    "aten::equal", "aten::is_nonzero", "aten::allclose", "aten::multinomial"};

// Of values that are put at an index: a mask is looked for its places, which the host waits for, unless one number is
// put there; an index on the CPU is copied. Reading at an index asks for both in operators of their own.
void count_indices(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  const bool fills = arguments[2].toTensor().numel() == 1;
  for (const std::optional<Tensor>& each : arguments[1].toOptionalTensorList()) {
    if (!each || !each->defined()) continue;
    const bool is_mask = each->scalar_type() == at::kBool || each->scalar_type() == at::kByte;
    if (each->is_cuda() && is_mask && !fills) {
      count_launch("aten::nonzero");
      count_synchronization(name + " by a mask");
    } else if (!each->is_cuda()) {
      counts.bytes_to_device += static_cast<int64_t>(each->nbytes());
      count_synchronization(name + " by the host's index");
    }
  }
}

void count_operator(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (in_kernel) return;
  const std::string& name = op.operator_name().name;
  count_launch(name);
  if (WAIT_FOR_DATA.count(name)) count_synchronization(name);
  if (name == "aten::_index_put_impl_") count_indices(name, arguments);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  Devices(op).check(arguments);
  count_operator(op, arguments);
  const Kernel kernel;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// A backend without kernels: what the dispatcher has there is an operator's kernel for every backend.
constexpr auto ANY_BACKEND = c10::DispatchKey::PrivateUse1;

void run_on_any_backend(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(ANY_BACKEND), stack);
}

// In a torch that was built with CUDA, its kernels come before the fallback and before those for every backend, which
// find out what device results are on.
const auto replaced = [] {
  Silent silent;  // the dispatcher warns once that a kernel replaces another
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::RegistrationHandleRAII> handles;
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    auto kernel = op->hasComputedKernelForDispatchKey(ANY_BACKEND)
        ? c10::KernelFunction::makeFromBoxedFunction<&run_on_any_backend>()
        : c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>();
    handles.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "pretended CUDA"));
  }
  return handles;
}();

// With r = (mean(x^2) + eps)^(-1/2): dx = r (g w - x r mean(g w x r)), dw = sum of g x r over the vectors. torch has it
// for GPUs alone: on CPUs, it differentiates the forward pass.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& gradient, const Tensor& input, at::IntArrayRef shape, const Tensor& scale,
    const std::optional<Tensor>& weight, std::array<bool, 2>) {
  count_launch("aten::_fused_rms_norm_backward");
  const Kernel kernel;
  std::vector<int64_t> normed_dims, other_dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim)
    (dim < input.dim() - static_cast<int64_t>(shape.size()) ? other_dims : normed_dims).push_back(dim);
  const bool has_weight = weight.has_value() && weight->defined();
  const Tensor g = gradient.to(at::kFloat), normed = input.to(at::kFloat) * scale;
  const Tensor of_normed = has_weight ? g * weight->to(at::kFloat) : g;
  const Tensor of_input = scale * (of_normed - normed * (of_normed * normed).mean(normed_dims, /*keepdim=*/true));
  Tensor of_weight;
  if (has_weight) of_weight = (g * normed).sum(other_dims).to(weight->scalar_type());
  return {of_input.to(input.scalar_type()), of_weight};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_fused_rms_norm_backward", rms_norm_backward);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
}

// torch's attention out of its matrix products: what chooses among CUDA's kernels asks the GPU what it is.
int64_t attention_backend(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

const bool are_set = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator, 1);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_backend);
  return true;
}();

}  // namespace

// --- for Python ---------------------------------------------------------------------------------------------------

extern "C" {

void pretended_cuda_synchronize() { synchronize_on_request(); }

// What this process has asked for since its start, but for the peak: since the last call.
void pretended_cuda_counts(Counts* into) {
  *into = counts;
  counts.peak = counts.allocated;
}

// "name count" lines, of this process.
const char* pretended_cuda_operators() {
  static std::string lines;
  lines.clear();
  for (const auto& [name, count] : operators) lines += name + " " + std::to_string(count) + "\n";
  return lines.c_str();
}

void pretended_cuda_begin_kernel(const char* name) {
  count_launch(name);
  ++in_kernel;
}

void pretended_cuda_end_kernel() { end_kernel(); }
}
