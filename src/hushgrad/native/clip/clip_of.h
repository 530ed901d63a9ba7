/* The kernels of clipping for one vector width: LANES floats. */
#define LANES (BYTES / 4)
#if BYTES == 64
#define HIGH 12 /* rows of a tile of two vectors: with them and a factor for each row, less than the registers there are */
#else
#define HIGH 6
#endif

#include "clip/lanes_of.h"
#include "clip/products_of.h"
#include "clip/rows_of.h"
#include "clip/wide_of.h"
#include "clip/groups_of.h"
#include "clip/conv_of.h"
#include "clip/table_of.h"

#undef LANES
#undef HIGH
