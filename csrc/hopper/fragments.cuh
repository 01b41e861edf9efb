// 8x8 tiles of 16-bit elements between registers and shared memory (ldmatrix, stmatrix), four at a
// time. Lane l passes the address of row l % 8 of tile l / 8; in a tile, lane l holds elements
// (l / 4, 2 * (l % 4) + {0, 1}), transposed in the _transposed forms.
#pragma once

#include <cstdint>

#include "hopper/mbarrier.cuh"

namespace ikbo::hopper {

__device__ inline void load_tiles(uint32_t (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_tiles_transposed(uint32_t (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void store_tiles(void* row, const uint32_t (&tiles)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
      : "memory");
}
__device__ inline void store_tiles_transposed(void* row, const uint32_t (&tiles)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
               : "memory");
}

}  // namespace ikbo::hopper
