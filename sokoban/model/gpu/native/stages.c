/* The quantities of RATIONAL, row by row: what the NumPy functions of sokoban/model/gpu compute column by column.
 *
 * Tables of construction are so small that calling NumPy takes longer than its arithmetic. Every expression stands here
 * in the order in which NumPy evaluates it, so that both give the same bits (no contraction, no fast mathematics; powers
 * and logarithms are left to NumPy). The Python functions explain what they compute; names are theirs, and the tests
 * hold the one against the other. Only schedules by multiply-adds of a `tile` come here.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* Constants of the Python functions, by their names. */
#define MERGED_BY_COMPILER 0.85
#define LINE_WAVEFRONTS 0.5
#define UNROLLED_LOADS 16.0
#define ROLLED_LOADS 4.0
#define GUARDED_UNROLLED_LOADS 3.5
#define BRANCHING_LOADS 1.1
#define GUARDED_LOADS 1.0
#define DIRECT_GUARD_INSTRUCTIONS 1.5
#define STEP_LATENCY 2.0
#define LOADED_LATENCY 1.28
#define LOCAL_PASSES 20.0
#define PROMOTED_STATEMENTS 430.0
#define UNPROMOTED_SHARE 0.9
#define SPILL_PASSES 1.0
#define UNHIDDEN_WAIT 1.0
#define LEAST_L1_BYTES 28672
#define HOISTED_WORDS 5.0
#define LIKELY_HOISTED_WORDS 8.0
#define HOISTING_RISK 0.15
#define HOISTING_ROOM 70.0

enum { AXES = 24, LOADS = 16, DIMS = 12, TERMS = 12, LANES = 64, BANKS = 128 };

typedef struct {
  i64 size, stride, offset, term_count;
  i64 axis[TERMS], coefficient[TERMS];
} Dimension;

typedef struct {
  i64 tensor, element_bytes, guarded, vectorises, innermost, keeps_in_l2, is_read_again, walks_outputs;
  i64 walks_reduction, dims;
  double compulsory_bytes, touched;
  Dimension dim[DIMS];
} Load;

/* The operator on the device; `compiled.py` writes both arrays in this order. */
typedef struct {
  i64 spatial, reduced, tensors, loads;
  i64 reduces, contiguous, last_output, width, dimensions, output_bytes, output_stored;
  i64 lanes, banks, bank_bytes, group_size, unit_count, l2_transaction, reads_pages;
  i64 registers_per_unit, registers_per_thread, granularity, uncounted, threads_per_unit, shared_per_unit;
  i64 shared_reserved, shared_per_block, threads_per_block, blocks_per_unit, request_cycles;
  i64 size[AXES];
  double value_instructions, final_instructions, per_instruction, boost_hz, passes_per_second, l2_seconds_rate;
  double output_elements, dram_bandwidth, other_bytes, latency, slower, limit, operations, block_launch, final_seconds;
  double l2_share, l1_share; /* latencies by that of DRAM */
  double l2_room, shared_capacity;
  Load load[LOADS];
} Form;

/* One schedule and what follows from its sizes alone. */
typedef struct {
  i64 tile[AXES], thread[AXES], vthreads[AXES], register_tile[AXES], threads[AXES], grid[AXES];
  i64 unrolled[AXES], cached[LOADS], padding[LOADS], vector[LOADS], turned[LOADS];
  i64 output_vector, reduce_threads, unroll, stages, asynchronous, raster;
  i64 threads_per_block, warps, block_count, step_count, step_points, reduced_points, block_points, accumulators;
  i64 unrolled_points, local, is_left;
  double thread_points, local_share;
  i64 coordinate[AXES][LANES];
} Row;

typedef struct {
  i64 elements;
  double loads, instructions, wavefronts, elements_per_thread, batches, bytes;
} Fetch;

typedef struct {
  double words, instructions, passes;
} Reads;

static i64 least(i64 a, i64 b) { return a < b ? a : b; }
static i64 most(i64 a, i64 b) { return a > b ? a : b; }
static double fleast(double a, double b) { return a < b ? a : b; }
static double fmost(double a, double b) { return a > b ? a : b; }
static i64 quotient(i64 a, i64 b) { /* rounded down; 0 for a divisor of 0, as in NumPy */
  if (b <= 0) return 0;
  if ((b & (b - 1)) == 0) return a >> __builtin_ctzll((unsigned long long)b); /* most are powers of two */
  i64 q = a / b;
  return q * b != a && a < 0 ? q - 1 : q;
}
static i64 ceiling(i64 a, i64 b) { return -quotient(-a, b); }
static i64 gcd(i64 a, i64 b) {
  a = a < 0 ? -a : a;
  b = b < 0 ? -b : b;
  while (b) {
    i64 rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* ---- the operator */

static void read_form(Form *form, const i64 *ints, const double *doubles) {
  i64 *head = &form->spatial;
  for (int i = 0; i < 29; i++) head[i] = *ints++;
  for (i64 a = 0; a < form->spatial + form->reduced; a++) form->size[a] = *ints++;
  double *rates = &form->value_instructions;
  for (int i = 0; i < 19; i++) rates[i] = *doubles++;
  for (i64 l = 0; l < form->loads; l++) {
    Load *load = &form->load[l];
    i64 *fields = &load->tensor;
    for (int i = 0; i < 10; i++) fields[i] = *ints++;
    load->compulsory_bytes = *doubles++;
    load->touched = *doubles++;
    for (i64 d = 0; d < load->dims; d++) {
      Dimension *dim = &load->dim[d];
      dim->size = *ints++, dim->stride = *ints++, dim->offset = *ints++, dim->term_count = *ints++;
      for (i64 t = 0; t < dim->term_count; t++) dim->axis[t] = *ints++, dim->coefficient[t] = *ints++;
    }
  }
}

/* ---- the schedule */

static void loop_nest(const Form *form, Row *row) {
  i64 copies = 1;
  for (i64 a = 0; a < form->spatial; a++) copies *= row->vthreads[a];
  i64 written = copies <= 15 ? copies : 1, generated = written, flat = written, reused = written;
  i64 promoted = 0, open_generated = 1, open_reused = 1, written_points = 1, limit = most(row->unroll, 1024), points = 1;
  for (i64 a = form->spatial; a < form->spatial + form->reduced; a++) row->unrolled[a] = 1;
  for (i64 loop = 0; loop < 1 + form->spatial + form->reduced; loop++) {
    i64 axis = -1, length = copies / written, is_reduced = loop > form->spatial;
    if (is_reduced) {
      axis = 2 * form->spatial + form->reduced - loop;
      length = ceiling(row->tile[axis], row->reduce_threads);
    } else if (loop) {
      length = row->thread[form->spatial - loop];
    }
    if (length == 1) continue;
    i64 whole = generated * length, used = reused * length;
    flat *= length;
    i64 fits = whole <= row->unroll, by_generator = open_generated && fits;
    open_generated = by_generator;
    if (by_generator) generated = whole;
    open_reused = open_reused && used <= limit;
    if (open_reused) reused = used;
    if (is_reduced) {
      if (open_reused) row->unrolled[axis] *= length;
      if (by_generator) written_points *= length;
    } else if (!by_generator) {
      promoted = flat;
    }
  }
  row->local_share = 0.0;
  if (promoted > 0 && row->accumulators > 16) {
    double ratio = PROMOTED_STATEMENTS / (double)promoted, square = ratio * ratio, fourth = square * square;
    row->local_share = UNPROMOTED_SHARE / (1.0 + fourth * fourth);
  }
  row->local = row->local_share > UNPROMOTED_SHARE / 2;
  for (i64 a = form->spatial; a < form->spatial + form->reduced; a++) points *= row->unrolled[a];
  row->unrolled_points = points;
  row->is_left = written_points == 1 && points > 1;
}

/* First element of every lane along each axis. Lanes count like the digits of a number, the first digit first. */
static void lane_coordinates(const Form *form, Row *row) {
  i64 all = form->spatial + form->reduced, last = form->reduced ? all - 1 : -1, digits = 0;
  i64 axis[AXES], base[AXES], digit[AXES], scale[AXES];
  if (last >= 0 && form->contiguous) axis[digits] = last, base[digits] = row->reduce_threads, scale[digits++] = 1;
  for (i64 a = form->spatial - 1; a >= 0; a--)
    axis[digits] = a, base[digits] = row->threads[a], scale[digits++] = form->size[a] > 1 ? row->thread[a] : 0;
  if (last >= 0 && !form->contiguous) axis[digits] = last, base[digits] = row->reduce_threads, scale[digits++] = 1;
  for (i64 a = form->spatial; a < all; a++) memset(row->coordinate[a], 0, sizeof(i64) * form->lanes);
  memset(digit, 0, sizeof(i64) * digits);
  for (i64 lane = 0; lane < form->lanes; lane++) {
    for (i64 d = 0; d < digits; d++) row->coordinate[axis[d]][lane] = digit[d] * scale[d];
    if (lane >= row->threads_per_block - 1) continue;
    for (i64 d = 0; d < digits && ++digit[d] >= base[d]; d++) digit[d] = 0;
  }
}

/* Lines of a table behind those of axes (table.py); none but `launched` of the last four is read here. */
enum { STAGES = 2, LAUNCHED = 6, OTHERS = 4, SINGLE = 8 };

static void read_row(const Form *form, Row *row, const i64 *columns, const i64 *padding, const i64 *raster, i64 count,
                     i64 index) {
  const i64 *next = columns + index;
#define TAKE (next += count, next[-count])
  i64 all = form->spatial + form->reduced;
  for (i64 a = 0; a < form->spatial; a++) row->tile[a] = TAKE;
  for (i64 a = 0; a < form->spatial; a++) row->thread[a] = TAKE;
  for (i64 a = 0; a < form->spatial; a++) row->vthreads[a] = TAKE;
  for (i64 a = form->spatial; a < all; a++) row->tile[a] = TAKE;
  row->reduce_threads = TAKE;
  row->unroll = TAKE;
  row->stages = TAKE;
  row->asynchronous = TAKE;
  next += OTHERS * count;
  for (i64 t = 0; t < form->tensors; t++) row->cached[t] = TAKE;
  for (i64 t = 0; t < form->tensors; t++) row->turned[t] = TAKE;
  for (i64 t = 0; t < form->tensors; t++) row->vector[t] = TAKE;
  row->output_vector = TAKE;
  for (i64 t = 0; t < form->tensors; t++) row->padding[t] = padding[t * count + index];
  row->raster = raster[index];
  row->accumulators = row->block_count = row->step_count = row->step_points = row->reduced_points = 1;
  row->block_points = 1;
  row->threads_per_block = row->reduce_threads;
  for (i64 a = 0; a < form->spatial; a++) {
    row->register_tile[a] = row->thread[a] * row->vthreads[a];
    row->threads[a] = quotient(row->tile[a], row->register_tile[a]);
    row->grid[a] = ceiling(form->size[a], row->tile[a]);
    row->accumulators *= row->register_tile[a];
    row->threads_per_block *= row->threads[a];
    row->block_count *= row->grid[a];
    row->block_points *= row->tile[a];
  }
  for (i64 a = form->spatial; a < all; a++) {
    i64 steps = ceiling(form->size[a], row->tile[a]);
    row->step_count *= steps;
    row->step_points *= row->tile[a];
    row->reduced_points *= steps * row->tile[a];
  }
  row->warps = ceiling(row->threads_per_block, form->lanes);
  row->thread_points = ceil((double)row->step_points / (double)row->reduce_threads);
  loop_nest(form, row);
  lane_coordinates(form, row);
}

/* ---- data tiles */

static i64 extent(const Dimension *dim, const i64 *tile) {
  i64 total = 1;
  for (i64 t = 0; t < dim->term_count; t++) {
    i64 c = dim->coefficient[t];
    total += (c < 0 ? -c : c) * (tile[dim->axis[t]] - 1);
  }
  return total;
}

static i64 is_turned(const Load *load, const Row *row) {
  return row->turned[load->tensor] && load->innermost != load->dims - 1;
}

/* The dimensions of a load as its tile is stored, innermost first. */
static void storage_order(const Load *load, const Row *row, i64 *order) {
  i64 innermost = is_turned(load, row) ? load->innermost : load->dims - 1, next = 0;
  if (load->dims) order[next++] = innermost;
  for (i64 d = load->dims - 1; d >= 0; d--)
    if (d != innermost) order[next++] = d;
}

static double tile_transaction_bytes(const Form *form, const Load *load, const i64 *tile, const i64 *extents,
                                     i64 transaction, i64 by_lane) {
  if (!load->dims) return (double)transaction;
  i64 clipped[DIMS], count = 1, last = load->dims - 1;
  for (i64 d = 0; d < load->dims; d++) count *= clipped[d] = least(extents[d], load->dim[d].size);
  double elements = (double)count;
  if (by_lane) return elements * (double)transaction;
  const Dimension *inner = &load->dim[last];
  double run = (double)((clipped[last] - 1) * inner->stride + 1), rows = elements / (double)clipped[last];
  i64 whole = clipped[last] >= inner->size && inner->stride == 1;
  for (i64 d = last - 1; d >= 0 && whole; d--) {
    run = run * (double)clipped[d];
    rows = rows / (double)clipped[d];
    whole = clipped[d] >= load->dim[d].size && load->dim[d].stride == 1;
  }
  double run_bytes = run * (double)load->element_bytes;
  i64 start = 0;
  for (i64 t = 0; t < inner->term_count; t++) {
    i64 axis = inner->axis[t];
    start = gcd(start, tile[axis] < form->size[axis] ? inner->coefficient[t] * inner->stride * tile[axis] : 0);
  }
  if (load->dims > 1) start = gcd(start, inner->size);
  if (inner->offset) start = gcd(start, inner->offset);
  if (start == 0) start = 1 << 20;
  start = (start & -start) * load->element_bytes;
  double per_row = start >= transaction ? ceil(run_bytes / (double)transaction)
                                        : (run_bytes + (double)transaction - (double)start) / (double)transaction;
  return fleast(rows * per_row, elements) * (double)transaction;
}

/* ---- data read again (reuse.py) */

typedef double (*BytesOf)(const Form *form, const Load *load, const i64 *tile);

static double transaction_bytes_of(const Form *form, const Load *load, const i64 *tile) {
  i64 extents[DIMS];
  for (i64 d = 0; d < load->dims; d++) extents[d] = extent(&load->dim[d], tile);
  return tile_transaction_bytes(form, load, tile, extents, form->l2_transaction, 0);
}

static double touched_bytes_of(const Form *form, const Load *load, const i64 *tile) {
  double total = (double)load->element_bytes;
  for (i64 d = 0; d < load->dims; d++) {
    const Dimension *dim = &load->dim[d];
    i64 points = 1;
    for (i64 t = 0; t < dim->term_count; t++) points *= least(tile[dim->axis[t]], form->size[dim->axis[t]]);
    total = total * (double)least(least(extent(dim, tile), dim->size), points);
  }
  return total;
}

static double turns_between(const Form *form, const Load *load, i64 axis) {
  double turns = 1.0;
  for (i64 d = 0; d < load->dims; d++) {
    const Dimension *dim = &load->dim[d];
    i64 along = 0, across = 0;
    for (i64 t = 0; t < dim->term_count; t++) {
      i64 c = dim->coefficient[t] < 0 ? -dim->coefficient[t] : dim->coefficient[t];
      if (dim->axis[t] == axis) along = c;
      if (dim->axis[t] < form->spatial) across = across ? least(across, c) : c;
    }
    if (along && across) turns = fmost(turns, (double)across / (double)along);
  }
  return turns;
}

/* Bytes of a load over all steps; `tile` has the spatial axes of what shares the cache, its others are written. */
static double bytes_of_all_steps(const Form *form, const Load *load, const Row *row, i64 *tile, double capacity,
                                 BytesOf bytes_of) {
  i64 all = form->spatial + form->reduced;
  for (i64 a = form->spatial; a < all; a++) tile[a] = least(row->tile[a], form->size[a]);
  double inside = bytes_of(form, load, tile), moved = inside;
  for (i64 a = all - 1; a >= form->spatial; a--) {
    double touched = 0.0, turns = (double)ceiling(form->size[a], tile[a]);
    for (i64 l = 0; l < form->loads; l++) touched = touched + bytes_of(form, &form->load[l], tile);
    tile[a] = form->size[a];
    double through = bytes_of(form, load, tile);
    double kept = 2.0 - touched * turns_between(form, load, a) / capacity;
    kept = kept < 0.0 ? 0.0 : kept > 1.0 ? 1.0 : kept;
    moved = moved * (kept * fleast(through / inside, turns) + (1.0 - kept) * turns);
    inside = through;
  }
  return moved;
}

/* ---- lanes */

static void sort(i64 *values, i64 count) {
  for (i64 i = 1; i < count; i++) {
    i64 value = values[i], j = i;
    for (; j > 0 && values[j - 1] > value; j--) values[j] = values[j - 1];
    values[j] = value;
  }
}

/* Elements of the whole tensor that the lanes of a warp read, but for a constant. */
static void tensor_addresses(const Form *form, const Load *load, const Row *row, i64 *addresses) {
  i64 pitch = 1;
  memset(addresses, 0, sizeof(i64) * form->lanes);
  for (i64 d = load->dims - 1; d >= 0; d--) {
    const Dimension *dim = &load->dim[d];
    for (i64 t = 0; t < dim->term_count; t++) {
      i64 scale = dim->coefficient[t] * dim->stride * pitch;
      for (i64 lane = 0; lane < form->lanes; lane++) addresses[lane] += row->coordinate[dim->axis[t]][lane] * scale;
    }
    pitch *= dim->size;
  }
}

static i64 cache_lines(const Form *form, const Load *load, const Row *row, i64 line_bytes) {
  i64 lines[LANES], different = 1;
  tensor_addresses(form, load, row, lines);
  for (i64 lane = 0; lane < form->lanes; lane++) lines[lane] = quotient(lines[lane] * load->element_bytes, line_bytes);
  sort(lines, form->lanes);
  for (i64 lane = 1; lane < form->lanes; lane++) different += lines[lane] != lines[lane - 1];
  return different;
}

typedef struct {
  i64 place[LANES], row[LANES];
} Parts;

static void lane_parts(const Form *form, const Load *load, const Row *row, const i64 *extents, Parts *parts) {
  i64 order[DIMS], pitch = 1;
  storage_order(load, row, order);
  memset(parts, 0, sizeof(Parts));
  for (i64 i = 0; i < load->dims; i++) {
    const Dimension *dim = &load->dim[order[i]];
    i64 *into = i ? parts->row : parts->place;
    for (i64 t = 0; t < dim->term_count; t++) {
      i64 scale = dim->coefficient[t] * pitch;
      for (i64 lane = 0; lane < form->lanes; lane++) into[lane] += row->coordinate[dim->axis[t]][lane] * scale;
    }
    if (i) pitch *= extents[order[i]];
  }
}

/* Words of the staged tile that lanes read, with rows `pitch` elements apart. */
static void tile_words(const Form *form, const Load *load, const Parts *parts, i64 pitch, i64 *words) {
  for (i64 lane = 0; lane < form->lanes; lane++) {
    words[lane] = parts->place[lane] + parts->row[lane] * pitch;
    if (load->element_bytes != form->bank_bytes)
      words[lane] = quotient(words[lane] * load->element_bytes, form->bank_bytes);
  }
}

/* Different words in the bank that has most of them. */
static i64 busiest_bank(const i64 *words, i64 lanes, i64 banks) {
  i64 used[BANKS], latest[BANKS], before[LANES], busiest = 0;
  memset(used, 0, sizeof(i64) * banks);
  for (i64 lane = 0; lane < lanes; lane++) {
    i64 word = words[lane];
    if (lane && word == words[lane - 1]) continue;
    /* The words of a bank so far: `latest` leads to the lane that came last, `before` from a lane to the one before. */
    i64 bank = word - quotient(word, banks) * banks, known = latest[bank], left = used[bank];
    for (; left > 0 && words[known] != word; left--) known = before[known];
    if (left > 0) continue;
    before[lane] = latest[bank];
    latest[bank] = lane;
    busiest = most(busiest, ++used[bank]);
  }
  return busiest;
}

/* Passes of a read of `size` adjacent words by every lane (banks.py). */
static i64 read_passes(const Form *form, const i64 *words, i64 size, i64 merges) {
  if (size == 1) return most(busiest_bank(words, form->lanes, form->banks), form->request_cycles);
  i64 pieces[LANES], passes = 0, next = 1, second = 1;
  for (i64 lane = 0; lane < form->lanes; lane++) pieces[lane] = quotient(words[lane], size);
  for (i64 lane = 0; lane < form->lanes && form->lanes >= 2 * size; lane++) {
    next = next && pieces[lane] == pieces[lane ^ 1];
    second = second && pieces[lane] == pieces[lane ^ 2];
  }
  i64 parts = merges && (next || second) ? size / 2 : size;
  if (form->lanes < 2 * size) parts = 1;
  i64 lanes = form->lanes / parts;
  for (i64 part = 0; part < parts; part++) passes += busiest_bank(pieces + part * lanes, lanes, form->banks / size);
  return most(passes, form->request_cycles);
}

/* ---- the fetch */

static i64 fetch_vector(const Load *load, const Row *row, const i64 *extents) {
  i64 vector = row->vector[load->tensor];
  if (vector == 0) {
    vector = 1;
    if (load->vectorises) {
      const Dimension *inner = &load->dim[load->dims - 1];
      vector = gcd(most(1, 16 / load->element_bytes), gcd(inner->offset, inner->size));
      for (i64 t = 0; t < inner->term_count; t++) vector = gcd(vector, inner->coefficient[t] * row->tile[inner->axis[t]]);
      i64 length = extents[load->dims - 1];
      vector = gcd(gcd(vector, length), length + row->padding[load->tensor]);
    }
  }
  return is_turned(load, row) && row->asynchronous ? 1 : vector;
}

static i64 product(const i64 *extents, i64 count) {
  i64 total = 1;
  for (i64 i = 0; i < count; i++) total *= extents[i];
  return total;
}

static i64 stored_row(const Load *load, const Row *row, const i64 *extents) {
  return load->dims ? extents[is_turned(load, row) ? load->innermost : load->dims - 1] : 1;
}

static double turned_store_passes(const Form *form, const Load *load, const Row *row, const i64 *extents, i64 padding) {
  i64 vector = fetch_vector(load, row, extents), length = stored_row(load, row, extents);
  i64 run = most(1, quotient(product(extents, load->dims), length));
  i64 lanes_along = most(1, least(form->lanes, quotient(run, most(1, vector))));
  i64 rows_at_a_time = most(1, form->lanes / lanes_along);
  i64 banks_apart = gcd(vector * (length + padding), form->banks);
  i64 different = least(lanes_along, form->banks / banks_apart);
  i64 several = different * least(rows_at_a_time, banks_apart);
  i64 reached = least(form->banks, different > 1 ? several : rows_at_a_time);
  return fmost(1.0, (double)form->lanes / (double)reached);
}

static i64 is_guard_shared(const Form *form, const Load *load, const Row *row, const i64 *extents, i64 vector) {
  i64 box = 1, checked = 0, threads = row->threads_per_block;
  for (i64 d = 0; d < load->dims; d++) {
    const Dimension *dim = &load->dim[d];
    i64 last = dim->offset + dim->stride * (extent(dim, form->size) - 1);
    checked = checked || dim->offset < 0 || last >= dim->size;
    if (checked) box *= extents[d];
  }
  return checked && vector == 1 && threads % extents[load->dims - 1] == 0 && (threads % box == 0 || box % threads == 0);
}

static double loads_in_flight(const Form *form, const Load *load, const Row *row, const i64 *extents, double loads,
                              i64 vector) {
  i64 unrolled = loads <= (double)most(row->unroll, 1);
  double together = unrolled ? UNROLLED_LOADS : ROLLED_LOADS;
  if (load->guarded && !is_guard_shared(form, load, row, extents, vector))
    together = !unrolled ? GUARDED_LOADS : row->step_count == 1 ? BRANCHING_LOADS : GUARDED_UNROLLED_LOADS;
  return fleast(loads, together);
}

static double tags_per_request(const Form *form, const Load *load, i64 run, i64 vector, i64 vectorised) {
  double bytes = (double)load->element_bytes, lanes = (double)form->lanes;
  i64 width = vectorised ? vector : 1, stride = vectorised ? 1 : vector, span = form->lanes * vector;
  i64 elements_of_row = least(run, span);
  double rows_of_request = fmost(1.0, (double)span / (double)run);
  double row_bytes = (double)(elements_of_row * load->element_bytes);
  double limit = ceil((double)elements_of_row / (double)stride);
  double sectors_of_row = fleast(row_bytes / 32.0 + 1.0 - bytes / 32.0, limit);
  double sectors = fleast(rows_of_request * sectors_of_row,
                          lanes * fmost(1.0, (double)(width * load->element_bytes) / 32.0));
  double lines_of_row = fleast(row_bytes / 128.0 + 1.0 - bytes / 128.0, limit);
  double lines = fleast(rows_of_request * lines_of_row, lanes);
  return fmost(lines, sectors * 32.0 / 128.0);
}

static Fetch fetch(const Form *form, const Load *load, const Row *row, const i64 *extents) {
  i64 bytes = load->element_bytes, elements = product(extents, load->dims), pipelined = row->stages > 1;
  i64 guarded = load->guarded, turned = is_turned(load, row), vector = fetch_vector(load, row, extents);
  i64 run = 1, whole = 1, last = load->dims - 1;
  for (i64 d = last; d >= 0 && whole; d--) {
    run *= extents[d];
    whole = extents[d] == load->dim[d].size;
  }
  i64 vectorised = vector > 1 && (vector & (vector - 1)) == 0 && vector * bytes <= 16 && run % vector == 0 &&
                   load->dims && load->dim[last].size % vector == 0;
  if (guarded) vectorised = vectorised && pipelined;
  double accesses = ceil((double)elements / (double)(row->threads_per_block * vector));
  double loads = vectorised ? accesses : accesses * (double)vector;
  i64 width = vectorised ? vector : 1, passes_per_store = 1;
  if (!vectorised) {
    i64 word = most(bytes, form->bank_bytes);
    i64 ways = gcd(most(1, quotient(vector * bytes, word)), form->banks * form->bank_bytes / word);
    passes_per_store = guarded ? ways : ways / gcd(ways, most(1, 16 / word));
  }
  double stores = fmost(1.0, (double)(width * bytes) / 4.0) * (double)passes_per_store;
  double instructions = loads * (guarded ? 21.0 : 7.0);
  if (turned) {
    stores = (double)width * turned_store_passes(form, load, row, extents, row->padding[load->tensor]);
    instructions = instructions + loads * (double)(width - 1);
  }
  if (pipelined) {
    instructions = loads * ((guarded ? 4.0 : 2.0) + (double)(turned ? width : 1));
    if (row->asynchronous) instructions = loads * (guarded ? 4.0 : 3.0);
  }
  double requests = (double)elements / (double)(form->lanes * width), waits = loads;
  if (guarded && extents[last] % vector == 0) waits = loads / (double)vector;
  Fetch part = {
      .elements = elements,
      .loads = loads,
      .instructions = instructions,
      .wavefronts = requests * (fmost(tags_per_request(form, load, run, vector, vectorised) * LINE_WAVEFRONTS,
                                      (double)form->request_cycles) +
                                fmost(stores, (double)form->request_cycles)),
      .elements_per_thread = loads * (double)width,
      .batches = fmost(1.0, waits / loads_in_flight(form, load, row, extents, loads, vector)),
      .bytes = tile_transaction_bytes(form, load, row->tile, extents, form->l2_transaction, 0),
  };
  return part;
}

/* ---- operand reads */

typedef struct {
  double words, instructions;
  i64 width;
} Instructions;

static Instructions read_instructions(const Form *form, const Load *load, const Row *row, const i64 *extents,
                                      const i64 *unrolled, i64 unrolled_points) {
  i64 order[DIMS], run = 1, pitch = 1, alignment = 0, runs_alignment = 0, contiguous = 1;
  double words = 1.0, bodies = fmost(1.0, row->thread_points / (double)unrolled_points);
  storage_order(load, row, order);
  for (i64 i = 0; i < load->dims; i++) {
    const Dimension *dim = &load->dim[order[i]];
    i64 span = 1, counted = 1, pieces = 1, copies = 0, number[TERMS], apart[TERMS];
    for (i64 t = 0; t < dim->term_count; t++) {
      i64 axis = dim->axis[t], c = dim->coefficient[t] < 0 ? -dim->coefficient[t] : dim->coefficient[t];
      i64 is_spatial = axis < form->spatial, stride = c * pitch;
      i64 elements = is_spatial ? row->thread[axis] : unrolled[axis];
      i64 others = is_spatial ? row->threads[axis] > 1 : unrolled[axis] < row->tile[axis];
      alignment = gcd(alignment, others ? elements * stride : 0);
      if (i) runs_alignment = gcd(runs_alignment, elements > 1 && !contiguous ? stride : 0);
      i64 reach = elements;
      if (is_spatial) {
        i64 alone = row->threads[axis] == 1;
        if (alone) reach = row->register_tile[axis];
        number[copies] = alone ? 1 : row->vthreads[axis];
        apart[copies++] = c * row->threads[axis] * reach;
      }
      if (dim->term_count == 1)
        span = counted = reach;
      else
        span += c * (reach - 1), counted *= reach;
    }
    i64 different = least(span, counted), stored = extents[order[i]];
    for (i64 j = 0; j < copies; j++) {
      if (dim->term_count == 1 || number[j] <= 1 || apart[j] >= span) {
        pieces *= number[j];
        continue;
      }
      i64 joined = span + apart[j] * (number[j] - 1);
      different = least(joined, different * number[j]);
      span = joined;
    }
    if (contiguous && different == span) run *= different;
    words = words * (double)(different * pieces);
    if (!i) stored += row->padding[load->tensor];
    contiguous = contiguous && different == stored;
    pitch *= stored;
  }
  runs_alignment = gcd(alignment, runs_alignment);
  i64 first = 1;
  if (row->cached[load->tensor]) {
    i64 fits = 1;
    while (fits * 2 <= run) fits *= 2;
    first = least(gcd(alignment, most(1, 16 / load->element_bytes)), fits);
  }
  double aligned = (double)gcd(runs_alignment, first) / (double)first;
  i64 wide = run / first, single = run % first;
  double per_run = (double)(wide + single) + (single == 0 ? 2.0 : 1.0) * (1.0 - aligned);
  Instructions found = {words, words / (double)run * fleast((double)run, per_run) * bodies, first};
  return found;
}

static Reads operand_reads(const Form *form, const Load *load, const Row *row, const i64 *extents) {
  static const i64 ones[AXES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  i64 staged = row->cached[load->tensor], words[LANES], known = 0, ways = 1 + row->is_left;
  double conflicts[2];
  Instructions both[2];
  if (staged) {
    Parts parts;
    lane_parts(form, load, row, extents, &parts);
    tile_words(form, load, &parts, stored_row(load, row, extents) + row->padding[load->tensor], words);
  } else {
    tensor_addresses(form, load, row, words);
    for (i64 lane = form->lanes - 1; lane >= 0; lane--)
      words[lane] = quotient((words[lane] - words[0]) * load->element_bytes, form->bank_bytes);
  }
  for (i64 way = 0; way < ways; way++) {
    both[way] = read_instructions(form, load, row, extents, way ? ones : row->unrolled, way ? 1 : row->unrolled_points);
    i64 size = least(most(both[way].width * load->element_bytes / form->bank_bytes, 1), form->banks);
    conflicts[way] = way && size == known ? conflicts[0] : (double)read_passes(form, words, size, staged);
    known = size;
  }
  if (ways == 1) {
    Reads reads = {both[0].words, both[0].instructions, both[0].instructions * conflicts[0]};
    return reads;
  }
  double unmerged = (1.0 - MERGED_BY_COMPILER) * both[1].instructions;
  Reads reads = {both[0].words, MERGED_BY_COMPILER * both[0].instructions + unmerged,
                 MERGED_BY_COMPILER * (both[0].instructions * conflicts[0]) + unmerged * conflicts[1]};
  return reads;
}

/* ---- DRAM */

static double super_tile(const Form *form, const Row *row, i64 remaining, i64 *tile) {
  double rounds = 1.0;
  i64 several = 0;
  for (i64 a = form->spatial; a < form->spatial + form->reduced; a++) tile[a] = form->size[a];
  for (i64 a = 0; a < form->spatial; a++) several += row->grid[a] > 1;
  i64 banded = row->raster > 0 && several > 1, behind = 0, bands = 1, across[AXES];
  for (i64 a = form->spatial - 1; a >= 0; a--) {
    i64 grid = row->grid[a], is_across = banded && grid > 1 && behind == 0, is_down = banded && grid > 1 && behind == 1;
    i64 width = is_across ? least(grid, most(1, row->raster)) : grid;
    if (is_across) bands = ceiling(grid, width);
    i64 cover = least(width, remaining);
    remaining = most(1, remaining / cover);
    rounds = rounds * (double)ceiling(width, cover);
    across[a] = cover;
    if (is_down) {
      i64 beside = least(bands, remaining);
      remaining = most(1, remaining / beside);
      rounds = rounds * (double)ceiling(bands, beside);
      for (i64 other = a + 1; other < form->spatial; other++)
        if (row->grid[other] > 1) across[other] = least(row->grid[other], across[other] * beside);
    }
    behind += grid > 1;
  }
  for (i64 a = 0; a < form->spatial; a++) tile[a] = least(across[a] * row->tile[a], form->size[a]);
  return rounds;
}

static double dram_bytes(const Form *form, const Load *load, const Row *row, const i64 *together, double rounds) {
  if (load->keeps_in_l2) return load->compulsory_bytes;
  double elements = 1.0;
  for (i64 d = 0; d < load->dims; d++) elements = elements * (double)least(extent(&load->dim[d], together), load->dim[d].size);
  double once = fmost(rounds * elements * (load->compulsory_bytes / load->touched), load->compulsory_bytes);
  if (!load->is_read_again || form->l2_room == 0.0) return once;
  i64 tile[AXES];
  memcpy(tile, together, sizeof(tile));
  double in_all = bytes_of_all_steps(form, load, row, tile, form->l2_room, touched_bytes_of);
  return once * fmost(1.0, in_all / touched_bytes_of(form, load, together));
}

/* ---- everything together */

static i64 granted_registers(const Form *form, const Row *row, i64 needed) {
  i64 per_warp = most(1, form->registers_per_unit / most(1, row->warps) / form->granularity) * form->granularity;
  return least(least(needed, per_warp / form->lanes), form->registers_per_thread);
}

static i64 store_width(const Form *form, const Row *row) {
  if (form->last_output < 0) return 1;
  i64 widest = gcd(row->thread[form->last_output], most(1, 16 / form->output_bytes));
  return row->output_vector == 0 ? widest : gcd(row->output_vector, widest);
}

static double stored_transactions(const Form *form, const Row *row) {
  double smallest = (double)form->output_bytes / (double)form->l2_transaction, lanes_of_warp = (double)form->lanes;
  if (form->last_output < 0) return smallest;
  i64 thread = row->thread[form->last_output], width = store_width(form, row);
  i64 lanes = least(form->lanes, row->threads[form->last_output]);
  double span = (double)(lanes * thread) * smallest + 1.0 - smallest;
  double per_store = fleast((double)lanes * fmost(1.0, (double)width * smallest), span) * (lanes_of_warp / (double)lanes);
  return fmost(smallest, per_store / (double)(form->lanes * width));
}

static double flat_instructions(const Form *form, const Row *row) {
  double total = 8.0;
  i64 first = 1;
  for (i64 a = 0; a < form->spatial; a++) {
    if (form->size[a] == 1) continue;
    const i64 counts[2] = {row->grid[a], row->threads[a]};
    for (i64 i = 0; i < 2 && !first; i++)
      if (counts[i] > 1) total = total + ((counts[i] & (counts[i] - 1)) == 0 ? 2.0 : 6.0);
    first = 0;
  }
  return total + (double)form->dimensions + (double)row->accumulators / (double)store_width(form, row);
}

/* Lines of the results; those from TOGETHER on, the seven stages of the whole kernel at last, and WAVES, `finish`
 * writes. */
enum {
  COMPUTE, ISSUE, SHARED, L2, STORED, FINAL, WAITING, DRAM, POWER, HOISTING, ROUNDS, CUBES,
  TOGETHER, ALONE, UNFILLED, STORES, FINISHING, UNITS, FILLING, WAITED, WHOLE
};
enum { REGISTERS, SPILLED, SHARED_BYTES, RESIDENT, RUNNING, WARPS, WAVES, BLOCKS, STEPS };
enum { ROW_ARITHMETIC, ROW_INSTRUCTIONS, ROW_KEPT, ROW_BATCHES, ROW_LOADS };

/* Cache lines in which a thread finds what one of its outputs needs of a load in a step. */
static double lines_along_step(const Form *form, const Load *load, const Row *row) {
  double lines = 1.0;
  for (i64 d = 0; d < load->dims; d++) {
    const Dimension *dim = &load->dim[d];
    i64 total = 1;
    for (i64 t = 0; t < dim->term_count; t++) {
      i64 c = dim->coefficient[t] < 0 ? -dim->coefficient[t] : dim->coefficient[t];
      if (dim->axis[t] >= form->spatial) total += c * (row->tile[dim->axis[t]] - 1);
    }
    lines = lines * (d == load->dims - 1 ? ceil((double)(total * load->element_bytes) / 128.0) : (double)total);
  }
  return lines;
}

static void price_row(const Form *form, const Row *row, const double *sharing, i64 count, i64 index, double *seconds,
                      i64 *counts) {
  i64 extents[LOADS][DIMS], operand_registers = 0, held_elements = row->local ? 0 : row->accumulators, any_cached = 0;
  i64 point[AXES], together[AXES], shares = sharing && row->reduce_threads > 1;
  Fetch parts[LOADS];
  Reads reads[LOADS];
  double direct[LOADS], loads = 0.0, words = 0.0, lanes_of_warp = (double)form->lanes;
  double accumulators = (double)row->accumulators;
  for (i64 a = 0; a < form->spatial; a++) point[a] = row->register_tile[a];
  for (i64 a = form->spatial; a < form->spatial + form->reduced; a++) point[a] = 1;
  for (i64 l = 0; l < form->loads; l++) {
    const Load *load = &form->load[l];
    i64 operand_elements = 1;
    for (i64 d = 0; d < load->dims; d++) {
      extents[l][d] = extent(&load->dim[d], row->tile);
      operand_elements *= extent(&load->dim[d], point);
    }
    parts[l] = fetch(form, load, row, extents[l]);
    operand_registers += least(operand_elements, 64);
    if (form->reduces) {
      reads[l] = operand_reads(form, load, row, extents[l]);
      direct[l] = reads[l].instructions;
      words = words + reads[l].words;
    } else {
      i64 width = 1, inner = is_turned(load, row) ? load->innermost : load->dims - 1;
      for (i64 t = 0; load->dims && t < load->dim[inner].term_count; t++) {
        i64 axis = load->dim[inner].axis[t];
        if (axis < form->spatial && load->dim[inner].coefficient[t] == 1) width = gcd(row->thread[axis], 4);
      }
      direct[l] = (double)operand_elements / (double)width * row->thread_points;
    }
    any_cached = any_cached || row->cached[load->tensor];
    loads = loads + (row->cached[load->tensor] ? parts[l].loads : direct[l]);
  }
#define SHARING(field) sharing[(field) * count + index]
  /* occupancy */
  i64 needed = (held_elements + (form->reduces ? operand_registers : 0)) * form->width + 20;
  if (shares) {
    loads = fmost(0.0, loads - SHARING(ROW_KEPT));
    needed = (i64)((double)needed + SHARING(ROW_KEPT));
  }
  i64 wanted = needed + (i64)fleast(loads, 24.0), shared = 0;
  double held = 0.0;
  for (i64 l = 0; l < form->loads; l++) {
    const Load *load = &form->load[l];
    if (!row->cached[load->tensor]) continue;
    if (load->dims) {
      i64 length = stored_row(load, row, extents[l]);
      i64 bytes = quotient(parts[l].elements, length) * (length + row->padding[load->tensor]) * load->element_bytes;
      shared += bytes * (row->asynchronous ? row->stages : least(row->stages, 2));
    }
    double registers = row->asynchronous ? 0.0 : parts[l].elements_per_thread * fmost(1.0, (double)load->element_bytes / 4.0);
    if (load->guarded) {
      held = held + (registers + parts[l].loads * 2.0);
      continue;
    }
    i64 width = most(1, (i64)rint(parts[l].elements_per_thread / fmost(parts[l].loads, 1e-9)));
    i64 behind = product(extents[l] + 1, load->dims - 1), alike = behind == 0 || row->threads_per_block * width % behind == 0;
    held = held + (registers + (alike || parts[l].loads <= 1.0 ? 2.0 : parts[l].loads * 2.0));
  }
  if (row->stages > 1) wanted = needed = (i64)((double)needed + held);
  i64 registers = granted_registers(form, row, wanted), spilled = most(0, needed - form->uncounted - registers);
  i64 counted = most(1, registers - form->uncounted);
  i64 per_warp = ceiling(counted * form->lanes, form->granularity) * form->granularity;
  i64 resident = least(least(form->threads_per_unit / most(1, row->warps * form->lanes),
                             form->registers_per_unit / most(1, per_warp * row->warps)),
                       least(form->shared_per_unit / most(1, shared + form->shared_reserved), form->blocks_per_unit));
  if (shared > form->shared_per_block || row->threads_per_block > form->threads_per_block) resident = 0;
  i64 busiest_blocks = ceiling(row->block_count, form->unit_count);
  i64 running = least(most(1, resident), busiest_blocks);
  double scheduler = (double)ceiling(row->warps * running, form->group_size);
  /* stages of a unit */
  i64 flat = row->step_count == 1 && !any_cached;
  double arithmetic = accumulators * (row->thread_points * form->value_instructions + (flat ? form->final_instructions : 0.0));
  double loops = flat ? flat_instructions(form, row) : 10.0, operands = 0.0, copies = 0.0, along = 0.0, row_passes = 0.0;
  if (row->asynchronous) loops = loops + 10.0;
  loops = loops + 3.0 * row->thread_points / (double)row->unrolled_points;
  double passes = 0.0, warps = (double)row->warps, block_bytes = 0.0, first = 0.0, more = 0.0;
  double direct_loads = 0.0, direct_lines = 0.0;
  for (i64 l = 0; l < form->loads; l++) {
    const Load *load = &form->load[l];
    i64 staged = row->cached[load->tensor];
    double read = form->reduces ? reads[l].instructions : parts[l].loads;
    if (load->guarded && !staged) read = read * (1.0 + DIRECT_GUARD_INSTRUCTIONS);
    operands = operands + read;
    copies = copies + (staged ? parts[l].instructions : 0.0);
    passes = passes + warps * (form->reduces ? reads[l].passes : parts[l].loads);
    passes = passes + (staged ? parts[l].wavefronts : 0.0);
    double moved = parts[l].bytes;
    if (staged && !row->asynchronous && form->reduced) {
      i64 room = most((i64)form->shared_capacity + LEAST_L1_BYTES - shared * running, LEAST_L1_BYTES), tile[AXES];
      memcpy(tile, row->tile, sizeof(tile));
      double each = bytes_of_all_steps(form, load, row, tile, (double)room / (double)running, transaction_bytes_of);
      moved = fleast(moved, each / (double)row->step_count);
    }
    i64 walks = form->contiguous && row->reduce_threads > 1 ? load->walks_reduction : load->walks_outputs;
    if (!staged && !walks)
      moved = fmost(moved, tile_transaction_bytes(form, load, row->tile, extents[l], form->l2_transaction, 1) / 4.0);
    block_bytes = block_bytes + moved;
    first = fmost(first, staged ? STEP_LATENCY : LOADED_LATENCY);
    if (staged) {
      more = more + (parts[l].batches - 1.0);
    } else {
      direct_loads = direct_loads + direct[l];
      direct_lines = direct_lines + lines_along_step(form, load, row);
    }
    if (shares) {
      double accesses = SHARING(ROW_LOADS + 2 * l), width = SHARING(ROW_LOADS + 2 * l + 1);
      along = along + accesses;
      double lines = width > 1.0 ? lanes_of_warp * width * (double)load->element_bytes / 128.0
                                 : (double)cache_lines(form, load, row, 128);
      row_passes = row_passes + accumulators * accesses * fmost(1.0, LINE_WAVEFRONTS * lines);
    }
  }
  if (shares) {
    double others = SHARING(ROW_INSTRUCTIONS) - SHARING(ROW_ARITHMETIC) - along;
    arithmetic = accumulators * SHARING(ROW_ARITHMETIC);
    operands = accumulators * along;
    loops = accumulators * others + 8.0;
    copies = 0.0;
    passes = warps * row_passes;
    first = LOADED_LATENCY;
    more = accumulators * SHARING(ROW_BATCHES) - 1.0;
  }
  double local = row->local_share;
  double homeless = local * (LOCAL_PASSES * accumulators) + (1.0 - local) * (SPILL_PASSES * (double)spilled);
  block_bytes = block_bytes + (double)spilled * row->thread_points * (4.0 * (double)row->threads_per_block);
  passes = passes + warps * row->thread_points * homeless;
  /* the whole kernel */
  double rounds = super_tile(form, row, most(1, most(1, resident) * form->unit_count), together);
  double moved = form->output_stored;
  for (i64 l = 0; l < form->loads; l++) {
    const Load *load = &form->load[l];
    double fetched = fmost(1.0, parts[l].bytes * (double)row->step_count * (double)row->block_count), factor = 1.0;
    if (form->reads_pages && !row->cached[load->tensor] && load->dims &&
        (double)cache_lines(form, load, row, 1024) >= lanes_of_warp / 2.0)
      factor = form->slower;
    moved = moved + fleast(dram_bytes(form, load, row, together, rounds), fetched) * factor;
  }
  moved = moved + form->other_bytes;
  if (direct_loads > 0.0 && !shares) {
    double bodies = fmost(1.0, row->thread_points / (double)row->unrolled_points);
    double waits = bodies * fmost(1.0, direct_loads / bodies / (row->is_left ? ROLLED_LOADS : UNROLLED_LOADS));
    double new_lines = fleast(waits, direct_lines);
    double from_dram = fleast(1.0, moved / (block_bytes * (double)row->step_count * (double)row->block_count));
    double far = form->l2_share + (1.0 - form->l2_share) * from_dram;
    more = more + (fmost(0.0, new_lines - 1.0) * far + (waits - new_lines) * form->l1_share);
  }
  double hoisting = 1.0;
  if (form->reduces && form->loads && spilled == 0) {
    double room = fmost(HOISTING_ROOM, (double)(granted_registers(form, row, 1 << 16) - row->accumulators - operand_registers));
    double risk = (words / room - HOISTED_WORDS) / (LIKELY_HOISTED_WORDS - HOISTED_WORDS);
    hoisting = 1.0 + HOISTING_RISK * (risk < 0.0 ? 0.0 : risk > 3.0 ? 3.0 : risk);
  }
#define SECONDS(field) seconds[(field) * count + index]
#define COUNT(field) counts[(field) * count + index]
  SECONDS(COMPUTE) = arithmetic * form->per_instruction * scheduler;
  SECONDS(ISSUE) = (arithmetic + operands + copies + loops) / form->boost_hz * scheduler;
  SECONDS(SHARED) = passes * (double)running / form->passes_per_second;
  SECONDS(L2) = block_bytes * (double)running / form->l2_seconds_rate;
  SECONDS(STORED) = form->output_elements / (double)row->block_count * stored_transactions(form, row) *
                    (double)form->l2_transaction / form->l2_seconds_rate;
  SECONDS(FINAL) = flat || row->reduce_threads > 1 ? 0.0 : (double)row->block_points * form->final_seconds;
  SECONDS(WAITING) = form->latency * (first + LOADED_LATENCY * more);
  SECONDS(DRAM) = moved / form->dram_bandwidth;
  SECONDS(POWER) = form->limit == 0.0
                       ? 0.0
                       : (double)(row->block_count * row->block_points * row->reduced_points) * form->operations * 2.0 / form->limit;
  SECONDS(HOISTING) = hoisting;
  SECONDS(ROUNDS) = (double)busiest_blocks / (double)running;
  double core = fmost(SECONDS(COMPUTE), SECONDS(ISSUE)), slowest = fmost(fmost(core, SECONDS(SHARED)), SECONDS(L2));
  double one = core / slowest, two = SECONDS(SHARED) / slowest, three = SECONDS(L2) / slowest;
  SECONDS(CUBES) = one * one * one + two * two * two + three * three * three;
  COUNT(REGISTERS) = registers;
  COUNT(SPILLED) = spilled;
  COUNT(SHARED_BYTES) = shared;
  COUNT(RESIDENT) = resident;
  COUNT(RUNNING) = running;
  COUNT(WARPS) = row->warps;
  COUNT(BLOCKS) = row->block_count;
  COUNT(STEPS) = row->step_count;
}

/* Stages of every row, to the lines of `seconds` and `counts`, of `count` each; `sharing` may be absent. */
void price(const i64 *ints, const double *doubles, const i64 *columns, const i64 *padding, const i64 *raster,
           const double *sharing, i64 count, double *seconds, i64 *counts) {
  Form form;
  Row row;
  read_form(&form, ints, doubles);
  for (i64 index = 0; index < count; index++) {
    read_row(&form, &row, columns, padding, raster, count, index);
    price_row(&form, &row, sharing, count, index, seconds, counts);
  }
}

/* Stages put together, from the results of `price`, behind which they stand, and the root of the sum of their cubes
 * (breakdown.py). */
void finish(const i64 *ints, const double *doubles, const i64 *columns, i64 count, const double *root,
            double *seconds, i64 *counts) {
  Form form;
  read_form(&form, ints, doubles);
  const i64 *single = columns + (3 * form.spatial + form.reduced) * count;
  const i64 *stages = single + STAGES * count, *launched = single + LAUNCHED * count;
  const i64 *cached = single + SINGLE * count;
  for (i64 index = 0; index < count; index++) {
    double compute = SECONDS(COMPUTE), issue = SECONDS(ISSUE), shared = SECONDS(SHARED), l2 = SECONDS(L2);
    double running = (double)COUNT(RUNNING), rounds = SECONDS(ROUNDS), steps = (double)COUNT(STEPS);
    double slowest = fmost(fmost(fmost(compute, issue), shared), l2);
    double stores = running * SECONDS(STORED);
    double together = slowest * root[index];
    /* Warps of a block that stages nothing wait apart from each other. */
    i64 meets = single[index] > 1;
    for (i64 t = 0; t < form.tensors; t++) meets = meets || cached[t * count + index];
    double by_itself = running;
    if (!meets) by_itself = running * fmost(1.0, (double)COUNT(WARPS) / (double)form.group_size);
    double work = together / by_itself, waiting = SECONDS(WAITING), filling = 0.0;
    i64 is_pipeline = stages[index] > 1;
    if (is_pipeline) {
      double ahead = (double)most(1, stages[index] - 1);
      double late = fmost(0.0, (LOADED_LATENCY * form.latency + l2 / running) / ahead - work) + 40.0 / form.boost_hz;
      waiting = fleast(late, waiting);
      filling = LOADED_LATENCY * form.latency / running;
      if (launched[index] > 0) filling = filling / fmost(1.0, rounds);
    }
    double alone = waiting + work, unfilled = is_pipeline ? 0.0 : UNHIDDEN_WAIT * fleast(waiting, work) / by_itself;
    SECONDS(TOGETHER) = together;
    SECONDS(ALONE) = alone;
    SECONDS(UNFILLED) = unfilled;
    SECONDS(STORES) = stores;
    double step = fmost(together, alone) + unfilled, finals = running * SECONDS(FINAL);
    double left = (1.0 - 1.0 / running) * (steps * fmost(0.0, step - compute));
    double finishing = fmost(0.0, finals - stores - left);
    SECONDS(FINISHING) = finishing;
    SECONDS(UNITS) = rounds * (steps * step + stores + finishing + filling);
    SECONDS(FILLING) = filling;
    SECONDS(WAITED) = waiting;
    i64 blocks = launched[index] > 0 ? least(launched[index], COUNT(BLOCKS)) : COUNT(BLOCKS);
    const double whole[7] = {
        fmost(rounds * steps * compute + rounds * finals, SECONDS(POWER)), rounds * steps * issue, rounds * steps * shared,
        rounds * steps * l2 + rounds * stores, SECONDS(DRAM), rounds * (steps * alone + filling),
        (double)blocks * form.block_launch,
    };
    for (i64 stage = 0; stage < 7; stage++) SECONDS(WHOLE + stage) = whole[stage];
    COUNT(WAVES) = ceiling(COUNT(BLOCKS), most(1, COUNT(RESIDENT)) * form.unit_count);
  }
}

/* sokoban.search.padding.bank_padding: `padding` is read and written, a line of `count` for every tensor. */
void pad(const i64 *ints, const double *doubles, const i64 *columns, const i64 *before, const i64 *raster, i64 count,
         i64 *padding) {
  Form form;
  Row row;
  read_form(&form, ints, doubles);
  for (i64 index = 0; index < count; index++) {
    read_row(&form, &row, columns, before, raster, count, index);
    for (i64 l = 0; l < form.loads; l++) {
      const Load *load = &form.load[l];
      if (!load->dims || !row.cached[load->tensor]) continue;
      i64 extents[DIMS], point[AXES], bytes = load->element_bytes, turned = is_turned(load, &row);
      for (i64 d = 0; d < load->dims; d++) extents[d] = extent(&load->dim[d], row.tile);
      for (i64 a = 0; a < form.spatial; a++) point[a] = row.register_tile[a];
      for (i64 a = form.spatial; a < form.spatial + form.reduced; a++) point[a] = 1;
      i64 length = stored_row(load, &row, extents), pads[3] = {0, most(1, 16 / bytes), 1 - length % 2};
      i64 chosen = 0, fewest = 0, words[LANES];
      Parts parts;
      lane_parts(&form, load, &row, extents, &parts);
      /* A turned tile is read as vectors, which an odd row would push out of line. */
      for (i64 i = 0; i < (turned ? 2 : 3); i++) {
        tile_words(&form, load, &parts, length + pads[i], words);
        i64 passes = busiest_bank(words, form.lanes, form.banks);
        if (turned) passes = passes * 64 + (i64)turned_store_passes(&form, load, &row, extents, pads[i]);
        if (i == 0 || passes < fewest) fewest = passes, chosen = pads[i];
        if (fewest == 1) break;
      }
      if (fewest > 1 && !turned) {
        i64 width = most(1, form.bank_bytes / bytes), all = form.banks * width;
        i64 read = extent(&load->dim[load->dims - 1], point);
        i64 formula = (all - length % all + width * ceiling(read, width)) % all;
        tile_words(&form, load, &parts, length + formula, words);
        if (busiest_bank(words, form.lanes, form.banks) < fewest) chosen = formula;
      }
      padding[load->tensor * count + index] = chosen;
    }
  }
}

/* sokoban.search.bands: bytes of operands that one more tile down a band adds, and one more across it, a line of `count`
 * each. */
void added_bytes(const i64 *ints, const double *doubles, const i64 *columns, const i64 *padding, const i64 *raster,
                 i64 count, double *down, double *across) {
  Form form;
  Row row;
  read_form(&form, ints, doubles);
  for (i64 index = 0; index < count; index++) {
    read_row(&form, &row, columns, padding, raster, count, index);
    i64 tile[AXES], axis_across = -1, axis_down = -1;
    for (i64 a = form.spatial - 1; a >= 0; a--) {
      tile[a] = row.tile[a];
      if (row.grid[a] <= 1) continue;
      if (axis_across < 0)
        axis_across = a;
      else if (axis_down < 0)
        axis_down = a;
    }
    for (i64 a = form.spatial; a < form.spatial + form.reduced; a++) tile[a] = form.size[a];
    down[index] = across[index] = 0.0;
    for (i64 l = 0; l < form.loads; l++) {
      const Load *load = &form.load[l];
      i64 elements = 1, is_down = 0, is_across = 0;
      for (i64 d = 0; d < load->dims; d++) {
        elements *= extent(&load->dim[d], tile);
        for (i64 t = 0; t < load->dim[d].term_count; t++) {
          is_down |= load->dim[d].axis[t] == axis_down;
          is_across |= load->dim[d].axis[t] == axis_across;
        }
      }
      double bytes = (double)elements * (double)load->element_bytes;
      if (is_down && !is_across) down[index] = down[index] + bytes;
      if (is_across && !is_down) across[index] = across[index] + bytes;
    }
  }
}

/* sokoban.search.bands: bytes of the operands from DRAM where `resident` blocks of the device run at once. */
void traffic(const i64 *ints, const double *doubles, const i64 *columns, const i64 *padding, const i64 *raster,
             const i64 *resident, i64 count, double *moved) {
  Form form;
  Row row;
  read_form(&form, ints, doubles);
  for (i64 index = 0; index < count; index++) {
    i64 together[AXES];
    read_row(&form, &row, columns, padding, raster, count, index);
    double rounds = super_tile(&form, &row, most(1, resident[index]), together);
    moved[index] = 0.0;
    for (i64 l = 0; l < form.loads; l++) moved[index] = moved[index] + dram_bytes(&form, &form.load[l], &row, together, rounds);
  }
}
