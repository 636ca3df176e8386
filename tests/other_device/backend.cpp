// A second device for torch, named "twin": memory of the host, kernels of the CPU, and a device of its own to dispatcher,
// autograd engine, autocast and allocator. It uses PrivateUse1, the mechanism for out-of-tree backends.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace {

constexpr auto TWIN = c10::DeviceType::PrivateUse1;
const at::Device HERE(TWIN, 0);

// Counts live bytes; capacity is ALL_BYTES.
constexpr int64_t ALL_BYTES = int64_t(1) << 30;

struct Memory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    count(bytes);
    at::DataPtr host = c10::GetCPUAllocator()->allocate(bytes);
    void* data = host.get();
    return {data, new Block{std::move(host), {}, static_cast<int64_t>(bytes)}, &release, HERE};
  }
  // A result of the host's kernels becomes the device's.
  at::DataPtr adopt(const at::Tensor& host, int64_t bytes) {
    count(bytes);
    return {host.storage().mutable_data(), new Block{{}, host, bytes}, &release, HERE};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) (*bytes)[0].current = live_, (*bytes)[0].peak = peak_;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak_ = live_.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {ALL_BYTES - live_, ALL_BYTES}; }

 private:
  struct Block {
    at::DataPtr data;
    at::Tensor tensor;
    int64_t bytes;
  };
  static void count(int64_t bytes) {
    auto now = live_ += bytes;
    if (now > ALL_BYTES) {
      live_ -= bytes;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "twin out of memory. Tried to allocate ", bytes, " bytes");
    }
    for (auto peak = peak_.load(); peak < now && !peak_.compare_exchange_weak(peak, now);) {}
  }
  static void release(void* pointer) {
    auto* block = static_cast<Block*>(pointer);
    live_ -= block->bytes;
    delete block;
  }
  static inline std::atomic<int64_t> live_{0}, peak_{0};
};
Memory memory;
REGISTER_ALLOCATOR(TWIN, &memory);

// One device with one stream. Work runs synchronously, so events are no-ops.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TWIN; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(HERE); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(HERE); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator() { device_ = HERE; key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return HERE; }
  const at::Generator& getDefaultGenerator(at::DeviceIndex) const override {
    static at::Generator one = at::make_generator<Generator>();
    return one;
  }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::DataPtr data = memory.allocate(bytes);
    std::memcpy(data.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Some devices have no double precision.
at::ScalarType checked(std::optional<at::ScalarType> dtype) {
  static const bool has_double = std::getenv("TWIN_WITHOUT_DOUBLE") == nullptr;
  TORCH_CHECK(has_double || dtype != at::kDouble, "twin has no float64");
  return c10::dtype_or_default(dtype);
}

// The same bytes as a tensor of the host, and the reverse.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  if (!tensor.numel()) return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));  // an `out` may grow
  return at::from_blob(
      tensor.storage().mutable_data(), tensor.sizes(), tensor.strides(), tensor.storage_offset(), [keep = tensor](void*) {},
      tensor.options().device(at::kCPU), at::kCPU);
}

at::Tensor with_storage(const c10::Storage& storage, const at::Tensor& like) {
  auto own = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                      like.dtype());
  own.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return own;
}

at::Tensor on_twin(const at::Tensor& host) {
  checked(host.scalar_type());
  auto bytes = static_cast<int64_t>(host.storage().nbytes());
  return with_storage(c10::Storage(c10::Storage::use_byte_size_t(), bytes, memory.adopt(host, bytes), &memory, true), host);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   checked(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           checked(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::_local_scalar_dense(on_host(tensor)); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t items = source.nbytes() / self.itemsize();
  return set_storage(self, source, 0, {items}, {1});
}

// Convolutions go to the backend's own: here the CPU's.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  auto bias_here = bias && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  return on_twin(at::convolution(on_host(input), on_host(weight), bias_here, stride, padding, dilation, transposed,
                                 output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  std::vector<int64_t> bias_size{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), bias_size, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  auto back = [](const at::Tensor& tensor) { return tensor.defined() ? on_twin(tensor) : tensor; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// Attention by its plain formula, as on a backend without kernels for it.
int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return 0;
}

// Runs the host's kernel on the same bytes.
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // of the device, and of the host
  at::Generator generator = at::globalContext().defaultGenerator(HERE), host_generator = at::globalContext().defaultGenerator(at::kCPU);
  auto host_of = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cpu()) return tensor;
    return pairs.emplace_back(tensor, on_host(tensor)).second;
  };
  for (auto value_at = stack->end() - op.schema().arguments().size(); value_at != stack->end(); ++value_at) {
    c10::IValue& value = *value_at;
    if (value.isTensor()) {
      value = host_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& one : value.toTensorVector()) hosts.push_back(host_of(one));
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const auto& one : value.toOptionalTensorVector()) hosts.push_back(one ? std::optional(host_of(*one)) : std::nullopt);
      value = hosts;
    } else if (value.isDevice()) {
      value = at::Device(at::kCPU);
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      value = c10::IValue();
    }
  }
  // While a random operator runs, the host's generator holds the state of the device's.
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  at::Tensor before;
  if (random) {
    before = host_generator.get_state();
    host_generator.set_state(generator.get_state());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (random) {
    generator.set_state(host_generator.get_state());
    host_generator.set_state(before);
  }
  for (auto& [own, host] : pairs) {
    if (own.sizes() == host.sizes()) continue;
    at::native::resize_(own, host.sizes(), std::nullopt);  // what was passed as `out`
    on_host(own).copy_(host);
  }
  auto own_of = [&](const at::Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [own, host] : pairs) {
      if (result.is_same(host)) return own;
      if (result.storage().data() == host.storage().data() && result.numel()) return with_storage(own.storage(), result);
    }
    return on_twin(result);
  };
  for (auto value_at = stack->end() - op.schema().returns().size(); value_at != stack->end(); ++value_at) {
    c10::IValue& value = *value_at;
    if (value.isTensor()) {
      value = own_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> own;
      for (const at::Tensor& one : value.toTensorVector()) own.push_back(own_of(one));
      value = own;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// Two of CUDA's autocast lists; its lists that promote, set a dtype or dispatch otherwise are left out.
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("unfold", at::native::unfold);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("_fused_sdp_choice", attention);
}

Hooks hooks;
const bool registered = [] {
  c10::register_privateuse1_backend("twin");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
