// Hooks in torch. The pretend libcudart loads this library at the first call of cudaGetDeviceCount.
//
// 1. A block that the caching allocator reuses is zeroed, like new memory. Pretend kernels write nothing, so the block would keep the
//    bytes of an older tensor, and half of a float32 can be a NaN in float16.
// 2. Operators with small tensors (at most PRETEND_COMPUTE elements together) are computed: after torch's CUDA code, the CPU's
//    operator writes the values that the kernels would have written, directly into the pretend device's memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <c10/cuda/CUDAStream.h>
#include <ATen/cuda/PhiloxCudaState.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" void pretend_drop(void*, size_t);
extern "C" char* pretend_bytes_at(const void*);
extern "C" void pretend_count(const char*);
extern "C" uint64_t pretend_capture_of(const void*);
extern "C" void pretend_record(uint64_t, std::function<void()>*);

namespace {

using c10::IValue;
using torch::jit::Stack;

int64_t limit = 65536;          // elements; negative: no limit
thread_local int inside = 0;    // above 0: an outer operator is computed as a whole

// ---- device tensors as CPU tensors on the same bytes

at::Tensor seen(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda() || tensor.is_sparse()) return tensor;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    auto found = at::from_blob(pretend_bytes_at(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
    if (tensor.is_conj()) found = found.conj();
    return found;
}

template <class F>
void each_tensor(const IValue& value, F visit) {
    if (value.isTensor()) {
        visit(value.toTensor());
    } else if (value.isList()) {
        for (const IValue& one : value.toListRef()) if (one.isTensor()) visit(one.toTensor());
    }
}

IValue on_cpu(const IValue& value) {
    if (value.isTensor()) return seen(value.toTensor());
    if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for (const at::Tensor& one : value.toTensorVector()) list.push_back(seen(one));
        return list;
    }
    if (value.isList() && value.toListRef().size()) {
        auto found = value.toList().copy();
        bool tensors = false;
        for (size_t i = 0; i < found.size(); i++) {
            IValue one = found.get(i);
            if (one.isTensor()) found.set(i, IValue(seen(one.toTensor()))), tensors = true;
        }
        return tensors ? IValue(found) : value;
    }
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (value.isGenerator()) return IValue();
    return value;
}

struct Sizes { int64_t elements = 0; bool cuda = false, mixed = false; };
Sizes sizes_of(const std::vector<IValue>& values) {
    Sizes found;
    for (const IValue& value : values)
        each_tensor(value, [&](const at::Tensor& one) {
            if (!one.defined()) return;
            if (one.is_cuda()) found.cuda = true;
            else if (one.dim()) found.mixed = true;
            if (one.is_sparse() || one.is_quantized() || one.is_sparse_csr()) found.mixed = true;
            found.elements += one.numel();
        });
    return found;
}

// ---- random numbers: drawn on the CPU from the seed and offset of the device's generator; the CPU's generator keeps its state

struct Draw {
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    at::Tensor before;
    explicit Draw(uint64_t seed) {
        std::lock_guard<std::mutex> guard(cpu.mutex());
        before = cpu.get_state();
        cpu.set_current_seed(seed);
    }
    ~Draw() {
        std::lock_guard<std::mutex> guard(cpu.mutex());
        cpu.set_state(before);
    }
};
struct Seed {  // of an operator; in a capture, where the graph finds seed and offset when it is launched
    uint64_t value = 0, offset = 0;
    const int64_t *seed_at = nullptr, *offset_at = nullptr;
    uint64_t now() const {
        if (!seed_at) return value;
        return uint64_t(*(const int64_t*)pretend_bytes_at(seed_at)) * 1000003ull + uint64_t(*(const int64_t*)pretend_bytes_at(offset_at)) + offset;
    }
};
Seed seed_of(const std::vector<IValue>& arguments) {
    at::Generator generator;
    for (const IValue& one : arguments) if (one.isGenerator()) generator = one.toGenerator();
    if (!generator.defined()) generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, c10::cuda::current_device()));
    if (generator.device().type() != at::kCUDA) return {};
    auto* cuda = at::check_generator<at::CUDAGeneratorImpl>(generator);
    at::PhiloxCudaState state = cuda->philox_cuda_state(0);
    if (state.captured_) return {0, state.offset_intragraph_, state.seed_.ptr, state.offset_.ptr};
    return {state.seed_.val * 1000003ull + state.offset_.val};
}

// ---- operators that the CPU has under other names

// The pretend cudnn cannot plan attention, so its outputs are made here. The temporary memory of the real cudnn is unknown.
const std::string CUDNN = "aten::_scaled_dot_product_cudnn_attention";
void cudnn_outputs(const std::string& name, Stack* stack, size_t takes) {
    std::vector<IValue> in(stack->end() - takes, stack->end());
    stack->erase(stack->end() - takes, stack->end());
    if (name == CUDNN) {
        at::Tensor q = in[0].toTensor(), k = in[1].toTensor(), v = in[2].toTensor();
        auto out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
        auto lse = in[4].toBool() ? at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat)) : at::Tensor();
        auto number = at::empty({}, q.options().dtype(at::kLong));
        torch::jit::push(*stack, out, lse, at::Tensor(), at::Tensor(), q.sym_size(2), k.sym_size(2), number, number, at::Tensor());
    } else {
        torch::jit::push(*stack, at::empty_like(in[1].toTensor()), at::empty_like(in[2].toTensor()), at::empty_like(in[3].toTensor()));
    }
}

at::Tensor mask_of(const at::Tensor& query, const at::Tensor& key, bool causal) {
    return at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).tril(0).logical_not();
}
struct Attention { at::Tensor q, k, v, probabilities, lse; double scale; };
// Several query heads may share a head of keys and values.
at::Tensor for_each_head(const at::Tensor& shared, const at::Tensor& q) {
    return shared.size(-3) == q.size(-3) ? shared : shared.repeat_interleave(q.size(-3) / shared.size(-3), -3);
}
at::Tensor of_shared_head(const at::Tensor& grad, const at::Tensor& out) {
    int64_t heads = out.size(1);
    return grad.size(1) == heads ? grad : grad.unflatten(1, at::IntArrayRef{heads, grad.size(1) / heads}).sum(2);
}
Attention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias, bool causal,
                 std::optional<double> scale) {
    Attention a{q.to(at::kFloat), for_each_head(k.to(at::kFloat), q), for_each_head(v.to(at::kFloat), q), {}, {}, scale.value_or(1.0 / std::sqrt(double(q.size(-1))))};
    auto scores = at::matmul(a.q, a.k.transpose(-2, -1)) * a.scale;
    if (bias && bias->defined()) scores = scores + bias->to(at::kFloat);
    if (causal) scores = scores.masked_fill(mask_of(q, k, true), -INFINITY);
    a.lse = at::logsumexp(scores, -1);
    a.probabilities = at::softmax(scores, -1).nan_to_num();
    return a;
}
// All shapes are (batch, heads, length, width). torch's CUDA code has already allocated the outputs.
bool attention(const std::string& name, const std::vector<IValue>& in, const std::vector<IValue>& out) {
    bool flash = name == "aten::_scaled_dot_product_flash_attention", efficient = name == "aten::_scaled_dot_product_efficient_attention";
    bool cudnn = name == CUDNN, cudnn_back = name == CUDNN + "_backward";
    bool flash_back = name == "aten::_scaled_dot_product_flash_attention_backward";
    bool efficient_back = name == "aten::_scaled_dot_product_efficient_attention_backward";
    if (!flash && !efficient && !flash_back && !efficient_back && !cudnn && !cudnn_back) return false;
    auto t = [&](size_t i) { return in[i].isTensor() ? seen(in[i].toTensor()) : at::Tensor(); };
    auto d = [&](size_t i) { return in[i].isNone() ? std::optional<double>() : std::optional<double>(in[i].toDouble()); };
    if (flash || efficient || cudnn) {  // q k v [bias lse?] dropout causal …scale
        auto bias = !flash && in[3].isTensor() ? std::optional<at::Tensor>(t(3)) : std::nullopt;
        bool causal = in[flash ? 4 : 6].toBool();
        Attention a = attend(t(0), t(1), t(2), bias, causal, d(in.size() - 1));
        seen(out[0].toTensor()).copy_(at::matmul(a.probabilities, a.v));
        at::Tensor lse = cudnn ? at::Tensor() : seen(out[1].toTensor());
        if (lse.defined() && lse.numel()) lse.narrow(-1, 0, std::min(lse.size(-1), a.lse.size(-1))).copy_(a.lse.narrow(-1, 0, std::min(lse.size(-1), a.lse.size(-1))));
        return true;
    }
    // flash: grad q k v out lse cq ck mq mk p causal seed offset scale; efficient: grad q k v bias out lse seed offset p mask causal scale
    // cudnn: grad q k v out lse seed offset bias cq ck mq mk p causal scale
    size_t at_bias = efficient_back ? 4 : 8;
    bool biased = !flash_back && in[at_bias].isTensor() && in[at_bias].toTensor().defined();
    auto bias = biased ? std::optional<at::Tensor>(t(at_bias)) : std::nullopt;
    Attention a = attend(t(1), t(2), t(3), bias, in[cudnn_back ? 14 : 11].toBool(), d(in.size() - 1));
    auto grad = t(0).to(at::kFloat);
    auto of_probabilities = at::matmul(grad, a.v.transpose(-2, -1));
    auto of_scores = a.probabilities * (of_probabilities - (of_probabilities * a.probabilities).sum(-1, true));
    std::vector<at::Tensor> grads = {at::matmul(of_scores, a.k) * a.scale, at::matmul(of_scores.transpose(-2, -1), a.q) * a.scale,
                                     at::matmul(a.probabilities.transpose(-2, -1), grad), of_scores};
    for (size_t i = 0; i < out.size() && i < 4; i++)
        if (out[i].isTensor() && out[i].toTensor().defined() && out[i].toTensor().numel())
            seen(out[i].toTensor()).copy_(i < 3 ? of_shared_head(grads[i], out[i].toTensor()) : at::sum_to(grads[3], out[i].toTensor().sizes()));
    return true;
}
void adapt(const std::string& name, std::vector<IValue>& in) {  // arguments that only the CUDA operator accepts
    if (name == "aten::histc") in[0] = in[0].toTensor().to(at::kFloat);
    if ((name == "aten::_softmax" || name == "aten::_log_softmax") && in[2].toBool()) {
        in[0] = in[0].toTensor().to(at::kFloat);
        in[2] = false;
    } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
        if (in[0].toTensor().scalar_type() != in[3].toScalarType()) in[3] = in[0].toTensor().scalar_type();
    }
}

// ---- the wrapper of an operator

struct Computed : c10::OperatorKernel {
    c10::SafeKernelFunction real;
    std::string name;
    bool random, returns_new;
    std::atomic<bool> fails{false};

    Computed(c10::SafeKernelFunction kernel, const c10::OperatorHandle& op, bool random_)
        : real(std::move(kernel)), name(toString(op.operator_name())), random(random_), returns_new(true) {
        for (const auto& one : op.schema().returns()) if (one.alias_info()) returns_new = false;
    }

    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
        const size_t takes = op.schema().arguments().size(), gives = op.schema().returns().size();
        // nonzero in an outer operator decides a shape there, as for index_put_ with a mask
        if (inside && name != "aten::nonzero") return run(op, keys, stack);
        if (fails) return run(op, keys, stack), zero_when_launched({stack->end() - gives, stack->end()});
        std::vector<IValue> arguments(stack->end() - takes, stack->end());
        Sizes given = sizes_of(arguments);
        if (given.mixed || (limit >= 0 && given.elements > limit)) return run(op, keys, stack), zero_when_launched({stack->end() - gives, stack->end()});
        Seed seed = random ? seed_of(arguments) : Seed();
        ++inside;
        try {
            run(op, keys, stack);
        } catch (...) {
            --inside;
            throw;
        }
        --inside;
        std::vector<IValue> made(stack->end() - gives, stack->end());
        Sizes all = sizes_of(made);
        if (all.mixed || (!given.cuda && !all.cuda) || (limit >= 0 && all.elements > limit)) return zero_when_launched(made);
        if (uint64_t capture = pretend_capture_of(c10::cuda::getCurrentCUDAStream().stream())) {
            // only views of the bytes are kept: the graph's pool reuses memory as it would without this
            std::vector<IValue> in, out;
            for (const IValue& one : arguments) in.push_back(on_cpu(one));
            for (const IValue& one : made) out.push_back(on_cpu(one));
            std::function<void()> call = [this, op, in, out, seed, zero = zeroing(made)]() mutable {
                if (fails) return zero();
                at::AutoDispatchBelowADInplaceOrView guard;
                ++inside;
                try {
                    auto results = out;
                    compute(op, in, results, seed.now());
                } catch (const std::exception& error) {
                    failed(error);
                    zero();
                }
                --inside;
            };
            pretend_record(capture, &call);
            return;
        }
        ++inside;
        try {
            at::AutoDispatchBelowADInplaceOrView guard;
            compute(op, arguments, made, seed.now());
        } catch (const std::exception& error) {
            failed(error);
        }
        --inside;
        std::copy(made.begin(), made.end(), stack->end() - gives);
    }

    // Results that are not computed are zero, as the allocator leaves new memory; a graph finds there what its last launch left.
    std::function<void()> zeroing(const std::vector<IValue>& made) {
        std::vector<std::pair<void*, size_t>> places;
        for (const IValue& value : made)
            each_tensor(value, [&](const at::Tensor& one) {
                bool whole = one.defined() && one.is_cuda() && one.is_non_overlapping_and_dense();
                if (returns_new && whole) places.emplace_back(one.data_ptr(), one.nbytes());
            });
        return [places] { for (auto [address, bytes] : places) pretend_drop(address, bytes); };
    }
    void zero_when_launched(const std::vector<IValue>& made) {
        uint64_t capture = pretend_capture_of(c10::cuda::getCurrentCUDAStream().stream());
        auto zero = zeroing(made);
        if (capture && returns_new) pretend_record(capture, &zero);
    }

    void failed(const std::exception& error) {
        fails = true;
        pretend_count(("not_computed." + name).c_str());
        if (getenv("PRETEND_VERBOSE")) fprintf(stderr, "pretend-cuda: %s is not computed: %s\n", name.c_str(), error.what());
    }

    void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
        if (name.rfind(CUDNN, 0) == 0) cudnn_outputs(name, stack, op.schema().arguments().size());
        else real.callBoxed(op, keys, stack);
    }

    void compute(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, std::vector<IValue>& made, uint64_t seed) {
        if (attention(name, arguments, made)) return;
        Stack on;
        for (const IValue& one : arguments) on.push_back(on_cpu(one));
        adapt(name, on);
        {
            std::unique_ptr<Draw> draw(random ? new Draw(seed) : nullptr);
            op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &on);
        }
        if (!returns_new) return;  // the CPU operator wrote in place
        for (size_t i = 0; i < made.size(); i++) {
            if (made[i].isTensor()) {
                made[i] = written(made[i].toTensor(), on[i].toTensor());
            } else if (made[i].isTensorList()) {
                auto ours = made[i].toTensorVector(), theirs = on[i].toTensorVector();
                for (size_t j = 0; j < ours.size() && j < theirs.size(); j++) ours[j] = written(ours[j], theirs[j]);
                made[i] = ours;
            }
        }
    }

    static at::Tensor written(at::Tensor ours, const at::Tensor& theirs) {
        if (!theirs.defined() || !ours.defined()) return ours;
        if (ours.sizes() != theirs.sizes() && ours.numel() != theirs.numel())  // the shape depends on the values, as for nonzero
            ours = at::empty(theirs.sizes(), ours.options());
        if (ours.numel()) seen(ours).copy_(theirs.reshape(ours.sizes()));
        return ours;
    }
};

struct Quiet : c10::WarningHandler { void process(const c10::Warning&) override {} };

// Whether an operator is not wrapped: views, queries, and copies between devices.
bool left_alone(const c10::OperatorHandle& op) {
    static const std::set<std::string> names = {"aten::_local_scalar_dense", "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_",
        "aten::_pin_memory", "aten::is_pinned", "aten::record_stream", "aten::_cudnn_init_dropout_state", "aten::_to_copy", "aten::_copy_from"};
    if (names.count(op.operator_name().name)) return true;
    bool tensors = false;
    for (const auto& one : op.schema().returns()) {
        if (one.alias_info() && !one.alias_info()->isWrite()) return true;
        tensors = tensors || one.type()->isSubtypeOf(*c10::TensorType::get()) || one.type()->kind() == c10::TypeKind::ListType;
    }
    for (const auto& one : op.schema().arguments()) tensors = tensors || (one.alias_info() && one.alias_info()->isWrite());
    return !tensors;
}

void compute_small_operators() {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0) continue;
        auto op = dispatcher.findSchema(name);
        if (!op || left_alone(*op)) continue;
        bool special = name.name.rfind("aten::_scaled_dot_product_", 0) == 0;
        if (!limit && name.name.rfind(CUDNN, 0) != 0) continue;
        bool own = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || name.name == "aten::copy_";
        if (!own || !(special || op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))) continue;
        bool random = op->hasTag(at::Tag::nondeterministic_seeded);
        auto kernel = op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
        std::string full = toString(name);
        library->impl(full.c_str(), c10::DispatchKey::CUDA,
                      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Computed>(kernel, *op, random)));
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void pretend_attach_operators() {
    if (const char* text = getenv("PRETEND_COMPUTE")) limit = std::string(text) == "all" ? -1 : atoll(text);
    compute_small_operators();
}

// Sets the number of elements, as PRETEND_COMPUTE does, and returns the present one. Nothing is computed where that was 0 at first.
extern "C" __attribute__((visibility("default"))) int64_t pretend_compute(int64_t elements) { return std::exchange(limit, elements); }

extern "C" __attribute__((visibility("default"))) void pretend_attach_allocator() {
    using Entry = c10::CachingDeviceAllocator::TraceEntry;
    c10::cuda::CUDACachingAllocator::get()->attachAllocatorTraceTracker([](const Entry& entry) {
        if (entry.action_ == Entry::ALLOC) pretend_drop(reinterpret_cast<void*>(entry.addr_), entry.size_);
    });
}
