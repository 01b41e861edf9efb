// ldmatrix and stmatrix.
#include "entry.h"
#include "hopper/fragments.cuh"

namespace ikbo {
namespace {

enum class Form { kLoad, kLoadTransposed, kStore, kStoreTransposed };

// Four 8x8 tiles, row after row in shared memory. Loads: in = tiles, out[lane][tile] = registers.
// Stores: the other way round.
__global__ void __launch_bounds__(32)
    fragments_test_kernel(Form form, const uint4* in, uint4* out) {
  __shared__ uint4 rows[32];
  const int lane = threadIdx.x;
  uint32_t tiles[4];
  if (form == Form::kLoad || form == Form::kLoadTransposed) {
    rows[lane] = in[lane];
    __syncwarp();
    if (form == Form::kLoad) {
      hopper::load_tiles(tiles, &rows[lane]);
    } else {
      hopper::load_tiles_transposed(tiles, &rows[lane]);
    }
    out[lane] = {tiles[0], tiles[1], tiles[2], tiles[3]};
    return;
  }
  const uint4 mine = in[lane];
  tiles[0] = mine.x, tiles[1] = mine.y, tiles[2] = mine.z, tiles[3] = mine.w;
  if (form == Form::kStore) {
    hopper::store_tiles(&rows[lane], tiles);
  } else {
    hopper::store_tiles_transposed(&rows[lane], tiles);
  }
  __syncwarp();
  out[lane] = rows[lane];
}

}  // namespace
}  // namespace ikbo

// in, out: 512 bytes each.
IKBO_TEST_ENTRY ikbo_test_fragments(int form, const void* in, void* out, cudaStream_t stream) {
  return ikbo::entry([&] {
    ikbo::launch(ikbo::fragments_test_kernel, {1, 32}, stream, static_cast<ikbo::Form>(form),
                 static_cast<const uint4*>(in), static_cast<uint4*>(out));
  });
}
