"""Sixteen float32 lanes as a Numba type, loaded from and stored to memory of any of the three element types.

Written out rather than left to the auto-vectoriser, which guards its loops with overlap checks and so sums in another
order when buffers lie unluckily: here the order depends on the hidden size alone, on every machine. LLVM maps a vector
to what the processor has (one AVX-512 register, two of AVX2, four of NEON).
"""

from functools import partial
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from tokenweave.comm.kernels.kept import sources

LANES = 16

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_STORED = {"float32": _F32, "bfloat16": _I16, "float16": ir.HalfType()}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Numba's cache looks at a kernel's own file only. The digest is part of every kernel's signature, so that an edit to
# any of these files makes it compile anew.
_DIGEST = sources(Path(__file__).parent)[:16]


class Elements(types.Type):
    """The address of memory that holds elements of one type; a Python int outside."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"Elements({element}, {_DIGEST})")


class Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector")


ELEMENTS = {name: Elements(name) for name in _STORED}
VECTOR = Vector()


@register_model(Elements)
class _ElementsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _I64)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _vector(_F32))


@unbox(Elements)
def _unbox_elements(kind: types.Type, value: Any, context: Any) -> NativeValue:
    return NativeValue(
        context.pyapi.long_as_longlong(value),
        is_error=cgutils.is_not_null(context.builder, context.pyapi.err_occurred()),
    )


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _splat(element: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(_vector(element), [value] * LANES)


def _at(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, element: str) -> ir.Value:
    address = builder.add(base, builder.mul(index, ir.Constant(_I64, _BYTES[element])))
    return builder.inttoptr(address, _vector(_STORED[element]).as_pointer())


def _read(builder: ir.IRBuilder, pointer: ir.Value, element: str) -> ir.Value:
    stored = builder.load(pointer, align=_BYTES[element])
    if element == "float32":
        return stored
    if element == "float16":
        return builder.fpext(stored, _vector(_F32))
    return builder.bitcast(builder.shl(builder.zext(stored, _vector(_I32)), _splat(_I32, 16)), _vector(_F32))


def _narrow(builder: ir.IRBuilder, value: ir.Value, element: str) -> ir.Value:
    """Round to nearest even. bfloat16 by hand: the processor's own instruction flushes subnormals to zero."""
    if element == "float32":
        return value
    if element == "float16":
        return builder.fptrunc(value, _vector(_STORED[element]))
    bits = builder.bitcast(value, _vector(_I32))
    odd = builder.and_(builder.lshr(bits, _splat(_I32, 16)), _splat(_I32, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _splat(_I32, 0x7FFF))), _splat(_I32, 16))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(nan, _splat(_I32, 0x7FC0), rounded), _vector(_I16))


def _local(builder: ir.IRBuilder, element: str) -> ir.Value:
    return cgutils.alloca_once(builder, _vector(_STORED[element]), zfill=True)


def _prefetch(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, to_write: int) -> ir.Value:
    pointer = builder.bitcast(_at(builder, args[0], args[1], signature.args[0].element), ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [pointer, _I32(to_write), _I32(3), _I32(1)])  # into every level, data
    return context.get_dummy_value()


@intrinsic
def address(context, elements):  # type: ignore[no-untyped-def]
    """As an integer."""
    return types.int64(elements), lambda context, builder, signature, args: args[0]


@intrinsic
def float32_at(context, address):  # type: ignore[no-untyped-def]
    """The integer `address` as Elements of float32."""
    return ELEMENTS["float32"](types.int64), lambda context, builder, signature, args: args[0]


@intrinsic
def elements_at(context, like, address):  # type: ignore[no-untyped-def]
    """The integer `address` as Elements of the type of `like`."""
    return like(like, types.int64), lambda context, builder, signature, args: args[1]


@intrinsic
def load(context, base, index):  # type: ignore[no-untyped-def]
    """base[index : index + 16] as float32."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _read(builder, _at(builder, args[0], args[1], base.element), base.element)

    return VECTOR(base, types.int64), generate


@intrinsic
def store(context, base, index, value):  # type: ignore[no-untyped-def]
    """base[index : index + 16] = value, rounded to nearest even."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store(
            _narrow(builder, args[2], base.element),
            _at(builder, args[0], args[1], base.element),
            align=_BYTES[base.element],
        )
        return context.get_dummy_value()

    return types.void(base, types.int64, VECTOR), generate


@intrinsic
def store_past_cache(context, base, index, value):  # type: ignore[no-untyped-def]
    """`store` where base[index] is aligned to the whole vector, without reading the line or keeping it in the cache.

    Needs a `fence` before other ranks are told."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = _at(builder, args[0], args[1], base.element)
        stored = builder.store(_narrow(builder, args[2], base.element), pointer, align=LANES * _BYTES[base.element])
        stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(base, types.int64, VECTOR), generate


@intrinsic
def prefetch(context, base, index):  # type: ignore[no-untyped-def]
    """Start fetching base[index]; the address need not exist."""
    return types.void(base, types.int64), partial(_prefetch, to_write=0)


@intrinsic
def prefetch_to_write(context, base, index):  # type: ignore[no-untyped-def]
    """`prefetch` that takes the line away from other cores, so that a store to it need not ask for it again."""
    return types.void(base, types.int64), partial(_prefetch, to_write=1)


@intrinsic
def load_part(context, base, index, count):  # type: ignore[no-untyped-def]
    """base[index : index + count] as float32, zeros behind; count < 16."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        local = _local(builder, base.element)
        builder.store(ir.Constant(_vector(_STORED[base.element]), None), local)
        cgutils.raw_memcpy(builder, local, _at(builder, args[0], args[1], base.element), args[2], _BYTES[base.element])
        return _read(builder, local, base.element)

    return VECTOR(base, types.int64, types.int64), generate


@intrinsic
def store_part(context, base, index, value, count):  # type: ignore[no-untyped-def]
    """base[index : index + count] = the first of value, rounded to nearest even; count < 16."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        local = _local(builder, base.element)
        builder.store(_narrow(builder, args[2], base.element), local)
        cgutils.raw_memcpy(builder, _at(builder, args[0], args[1], base.element), local, args[3], _BYTES[base.element])
        return context.get_dummy_value()

    return types.void(base, types.int64, VECTOR, types.int64), generate


@intrinsic
def rounded(context, like, value):  # type: ignore[no-untyped-def]
    """value rounded to the element type of `like`, as float32 again."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if like.element == "float32":
            return args[1]
        local = _narrow(builder, args[1], like.element)
        if like.element == "float16":
            return builder.fpext(local, _vector(_F32))
        return builder.bitcast(builder.shl(builder.zext(local, _vector(_I32)), _splat(_I32, 16)), _vector(_F32))

    return VECTOR(like, VECTOR), generate


@intrinsic
def splat(context, value):  # type: ignore[no-untyped-def]
    """`value` in every lane."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        one = builder.insert_element(ir.Constant(_vector(_F32), ir.Undefined), args[0], _I32(0))
        return builder.shuffle_vector(one, one, _splat(_I32, 0))

    return VECTOR(types.float32), generate


@intrinsic
def add(context, a, b):  # type: ignore[no-untyped-def]
    return VECTOR(VECTOR, VECTOR), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def multiply(context, a, b):  # type: ignore[no-untyped-def]
    return VECTOR(VECTOR, VECTOR), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def total(context, value):  # type: ignore[no-untyped-def]
    """The sum of the lanes: halves added to each other until one is left."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        vector, width = args[0], LANES
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(_I32, width), list(range(i, i + width))) for i in (0, width)]
            low, high = (builder.shuffle_vector(vector, vector, half) for half in halves)
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, _I32(0))

    return types.float32(VECTOR), generate
