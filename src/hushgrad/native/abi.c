/* What a library was built from. Written by _generate.py from abi.h. */
#include "abi.h"

const uint64_t hushgrad_abi[] = {HUSHGRAD_ABI, sizeof(address), sizeof(solutions), sizeof(facts), sizeof(bound), sizeof(geometry), sizeof(signal)};
