/* The tile instructions of AMX in C, for machines without them. Included before variant.c. */

#ifndef MILLRACE_TEST_TILES_H
#define MILLRACE_TEST_TILES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;
static _Thread_local uint8_t tiles[8][16][64];

#define TILE_CONFIGURE(config) memcpy(&tile_config, &(config), sizeof tile_config)
#define TILE_RELEASE() memset(&tile_config, 0, sizeof tile_config)
#define TILE_ZERO(tile) (tile_check(tile), memset(tiles[tile], 0, sizeof tiles[tile]))
#define TILE_LOAD(tile, from, stride) tile_copy(tile, (uint8_t *)(from), stride, 0)
#define TILE_STORE(tile, to, stride) tile_copy(tile, (uint8_t *)(to), stride, 1)
#define TILE_PRODUCT(c, a, b) tile_product(c, a, b)

/* A tile that is not configured is an illegal instruction. */
static inline void tile_check(int tile)
{
    if (tile_config.palette != 1 || !tile_config.rows[tile] || tile_config.rows[tile] > 16 || tile_config.row_bytes[tile] > 64)
        abort();
}

static inline void tile_copy(int tile, uint8_t *memory, int64_t stride, int stores)
{
    tile_check(tile);
    if (!stores)
        memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int row = 0; row < tile_config.rows[tile]; row++) {
        void *to = stores ? memory + row * stride : tiles[tile][row], *from = stores ? tiles[tile][row] : memory + row * stride;
        memcpy(to, from, tile_config.row_bytes[tile]);
    }
}

static inline float tile_number(int tile, int row, int place)
{
    uint16_t x;
    memcpy(&x, tiles[tile][row] + 2 * place, sizeof x);
    uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline void tile_product(int c, int a, int b)
{
    tile_check(a);
    tile_check(b);
    tile_check(c);
    if (tile_config.rows[a] != tile_config.rows[c] || tile_config.row_bytes[a] != 4 * tile_config.rows[b])
        abort();
    for (int row = 0; row < tile_config.rows[c]; row++)
        for (int column = 0; column < tile_config.row_bytes[c] / 4; column++) {
            float sum;
            memcpy(&sum, tiles[c][row] + 4 * column, sizeof sum);
            for (int pair = 0; pair < tile_config.row_bytes[a] / 4; pair++)
                for (int i = 0; i < 2; i++)
                    sum += tile_number(a, row, 2 * pair + i) * tile_number(b, pair, 2 * column + i);
            memcpy(tiles[c][row] + 4 * column, &sum, sizeof sum);
        }
}

#endif
