// Undefines what simd.h and the file that includes it defined for one instruction set.

#undef ELEMENT
#undef PANEL
#undef INLINE
#undef INTS
#undef UINTS
#undef FLOATS
#undef PAIRS
#undef COLUMNS
#undef WIDTH
#undef TARGET
#undef VNNI_TARGET
#undef LEVEL
