// Activations as wgmma reads them from shared memory, in the order of global memory, so that a tile
// of 64 columns is one copy: [columns / 64, padded tokens, 64] bf16, 16-byte piece p of token t at
// p ^ (t & 7).
//
// Offers: tiled_piece (where piece `piece` of a token's row lies, counted in pieces). Barriers:
// none.
#include "common.cuh"

__device__ __forceinline__ long long tiled_piece(int piece, int token, int padded) {
  return ((long long)(piece >> 3) * padded + token) * 8 + ((piece ^ token) & 7);
}
