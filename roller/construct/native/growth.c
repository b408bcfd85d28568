/* Walks of the construction: paths of growth (roller/construct/growth.py), and all tiles of the shared layer over a
 * register tile (roller/construct/shared_layer.py), which explain what is computed here.
 *
 * Integers as Python has them as long as bytes moved stay below 2^63, scores in the same order of operations.
 */
#include <stdint.h>

typedef int64_t i64;

enum { AXES = 24 };

typedef struct {
  i64 elements, held;
  double traffic;
} Costs;

/* `space`: axes, spatial axes, inputs, sizes; of every input its element bytes, how many plain axes and which, how many
 * windows, and of each its extent beside the sum, how many terms, and axis and coefficient of each. */
static Costs costs(const i64 *space, const i64 *shape) {
  i64 axes = space[0], spatial = space[1], inputs = space[2], tiles = 1;
  const i64 *sizes = space + 3, *next = sizes + axes;
  Costs found = {1, 0, 0.0};
  for (i64 a = 0; a < spatial; a++) found.elements *= shape[a];
  for (i64 a = 0; a < axes; a++) tiles *= (sizes[a] + shape[a] - 1) / shape[a];
  for (i64 i = 0; i < inputs; i++) {
    i64 bytes = *next++, count = 1;
    for (i64 left = *next++; left > 0; left--) count *= shape[*next++];
    for (i64 left = *next++; left > 0; left--) {
      i64 extent = *next++;
      for (i64 terms = *next++; terms > 0; terms--, next += 2) extent += next[1] * shape[next[0]];
      count *= extent;
    }
    found.elements += count;
    found.held += bytes * count;
  }
  found.traffic = (double)(tiles * found.held);
  return found;
}

typedef struct {
  i64 axis, size;
  double score;
  Costs costs;
} Step;

/* The step from `shape` with the `rank`-th best score that fits; axis -1 for none, then `blocked` is the most rewarding
 * one that does not fit. `sizes`: of every axis how many, and the sizes, ascending. */
static Step best_step(const i64 *space, i64 *shape, const i64 **sizes, Costs before, i64 in_bytes, i64 capacity,
                      i64 rank, Step *blocked) {
  Step steps[AXES], none = {.axis = -1};
  i64 count = 0;
  *blocked = none;
  for (i64 a = 0; a < space[0]; a++) {
    i64 entries = sizes[a][0], now = shape[a], entry = 1;
    if (sizes[a][entries] <= now) continue;
    while (sizes[a][entry] <= now) entry++;
    shape[a] = sizes[a][entry];
    Step step = {.axis = a, .size = shape[a], .costs = costs(space, shape)};
    shape[a] = now;
    i64 held = in_bytes ? before.held : before.elements, grown = in_bytes ? step.costs.held : step.costs.elements;
    i64 added = grown - held > 1 ? grown - held : 1;
    step.score = (before.traffic - step.costs.traffic) / (double)added;
    if (!(step.score > 0.0)) continue;
    if (grown > capacity) {
      if (blocked->axis < 0 || step.score >= blocked->score) *blocked = step;
      continue;
    }
    /* Best first; of equal ones the innermost axis. */
    i64 place = count++;
    for (; place > 0 && steps[place - 1].score <= step.score; place--) steps[place] = steps[place - 1];
    steps[place] = step;
  }
  return count ? steps[rank < count - 1 ? rank : count - 1] : none;
}

/* Walk from `start` until no step is left, or `most` are made; the number of steps.
 *
 * `menu`: the sizes of every axis, see above. By the step with the `rank`-th best score in the first `ranked` steps, by
 * the best one later. `in_bytes`: whether `capacity` bounds bytes in shared memory, or elements in registers. Of every
 * step a line of `steps` gets the axis, the elements, the bytes and the shape, a line of `numbers` score and traffic.
 * The line behind the last step has the most rewarding step that was blocked, axis -1 for none. */
i64 grow(const i64 *space, const i64 *start, const i64 *menu, i64 in_bytes, i64 capacity, i64 rank, i64 ranked, i64 most,
         i64 *steps, double *numbers) {
  i64 axes = space[0], shape[AXES], width = axes + 3;
  const i64 *sizes[AXES];
  for (i64 a = 0; a < axes; a++) {
    shape[a] = start[a];
    sizes[a] = menu;
    menu += 1 + menu[0];
  }
  Costs before = costs(space, shape);
  for (i64 number = 0;; number++) {
    Step blocked, step = best_step(space, shape, sizes, before, in_bytes, capacity, number < ranked ? rank : 0, &blocked);
    i64 *line = steps + number * width, ends = step.axis < 0 || number == most;
    if (ends && step.axis >= 0) blocked.axis = -1;
    if (ends) step = blocked;
    if (step.axis >= 0) shape[step.axis] = step.size;
    line[0] = step.axis, line[1] = step.costs.elements, line[2] = step.costs.held;
    for (i64 a = 0; a < axes; a++) line[3 + a] = shape[a];
    numbers[2 * number] = step.score;
    numbers[2 * number + 1] = step.costs.traffic;
    if (ends) return number;
    before = step.costs;
  }
}

/* ---- the shared layer */

/* What a line says of its tile, in the order of shared_layer.py. */
enum { START, GROW, SHORTEN, FED, SLOW, THREADS, BLOCKED, SATED, LONGER, SHRINK };

/* What bounds tiles: `limits` and `rates` as shared_layer.py writes them. */
typedef struct {
  i64 capacity, longer_bytes, lanes, lanes_of_tile, threads_per_block, units, step_points, tail, few_waves, doublings;
} Limits;
typedef struct {
  double work, bandwidth, compute, epsilon;
} Rates;

typedef struct {
  const i64 *space, *registers, *least, *single;
  const Limits *limits;
  const Rates *rates;
  i64 count, most, tile_count, *lines, *tiles;
  double *scores;
} Walk;

/* A line more: what is said, the line before it, two numbers, the shape, and the score; its number. */
static i64 say(Walk *walk, i64 kind, i64 before, i64 number, i64 other, double score, const i64 *shape) {
  i64 axes = walk->space[0], place = walk->count < walk->most ? walk->count : walk->most - 1;
  i64 *line = walk->lines + place * (axes + 4);
  line[0] = kind, line[1] = before, line[2] = number, line[3] = other;
  for (i64 a = 0; a < axes; a++) line[4 + a] = shape[a];
  walk->scores[place] = score;
  walk->count++;
  return place;
}

/* The tile of a line is to be proposed. */
static i64 propose(Walk *walk, i64 line) {
  if (walk->tile_count < walk->most) walk->tiles[walk->tile_count++] = line;
  return line;
}

static i64 threads_of(const Walk *walk, const i64 *shape) {
  i64 threads = walk->limits->lanes_of_tile;
  for (i64 a = 0; a < walk->space[1]; a++) threads *= shape[a] / walk->registers[a];
  return threads;
}

static i64 fills_warps(const Walk *walk, i64 threads) {
  i64 lanes = walk->limits->lanes, warps = (threads + lanes - 1) / lanes;
  return (double)(warps * lanes - threads) <= walk->rates->epsilon * (double)warps * (double)lanes;
}

static i64 blocks_of(const Walk *walk, const i64 *shape) {
  i64 blocks = 1;
  for (i64 a = 0; a < walk->space[1]; a++) blocks *= (walk->space[3 + a] + shape[a] - 1) / shape[a];
  return blocks;
}

/* Halve the longest reduction step, and hold its axis to that; whether there is one. */
static i64 halve_step(const Walk *walk, i64 *shape, const i64 **sizes, i64 (*held)[2]) {
  i64 axis = -1;
  for (i64 a = walk->space[1]; a < walk->space[0]; a++)
    if (shape[a] > walk->least[a] && (axis < 0 || shape[a] / walk->least[a] > shape[axis] / walk->least[axis])) axis = a;
  if (axis < 0) return 0;
  i64 least = walk->least[axis], half = shape[axis] / 2 / least * least;
  shape[axis] = half > least ? half : least;
  held[axis][0] = 1, held[axis][1] = shape[axis];
  sizes[axis] = held[axis];
  return 1;
}

/* Whether growing an axis through its sizes may save traffic. */
static i64 can_save(const i64 *space, i64 axis, const i64 *sizes) {
  const i64 *next = space + 3 + space[0];
  for (i64 i = 0; i < space[2]; i++) {
    i64 plain = 0;
    next++;
    for (i64 left = *next++; left > 0; left--) plain |= *next++ == axis;
    if (!plain) return 1;
    for (i64 left = *next++; left > 0; left--) next += 2 + 2 * next[1];
  }
  for (i64 entry = 1; entry <= sizes[0]; entry++)
    if (space[3 + axis] % sizes[entry]) return 1;
  return 0;
}

/* The tile of a line with longer reduction steps. */
static void longer_steps(Walk *walk, i64 line, i64 doublings) {
  i64 axes = walk->space[0], shape[AXES];
  for (i64 a = 0; a < axes; a++) shape[a] = walk->lines[line * (axes + 4) + 4 + a];
  for (; doublings > 0; doublings--) {
    const i64 *sizes = walk->space + 3;
    i64 axis = -1;
    for (i64 a = walk->space[1]; a < axes; a++)
      if (!walk->single[a] && shape[a] * 2 <= sizes[a] && (axis < 0 || sizes[a] / shape[a] > sizes[axis] / shape[axis]))
        axis = a;
    if (axis < 0) return;
    shape[axis] *= 2;
    if (costs(walk->space, shape).held > walk->limits->longer_bytes) return;
    line = propose(walk, say(walk, LONGER, line, 0, 0, 0.0, shape));
  }
}

/* Halve the spatial axis whose reuse is worth least; whether there is one. */
static i64 shrink(const Walk *walk, i64 *shape) {
  Costs now = costs(walk->space, shape);
  double least = 0.0;
  i64 axis = -1;
  for (i64 a = 0; a < walk->space[1]; a++) {
    i64 whole = shape[a], half = whole / 2;
    if (half < walk->registers[a] || half % walk->registers[a]) continue;
    shape[a] = half;
    Costs small = costs(walk->space, shape);
    shape[a] = whole;
    i64 added = now.held - small.held > 1 ? now.held - small.held : 1;
    double score = (small.traffic - now.traffic) / (double)added;
    if (axis < 0 || score < least) axis = a, least = score;
  }
  if (axis < 0) return 0;
  shape[axis] /= 2;
  return 1;
}

/* The tile of a line, with longer steps, and shrunken until every unit has a block. */
static void fit_device(Walk *walk, i64 line) {
  i64 axes = walk->space[0], shape[AXES], kept = line, units = walk->limits->units;
  for (i64 a = 0; a < axes; a++) shape[a] = walk->lines[line * (axes + 4) + 4 + a];
  propose(walk, line);
  longer_steps(walk, line, 1);
  i64 blocks = blocks_of(walk, shape), kept_blocks = blocks;
  while (blocks < units && shrink(walk, shape)) {
    line = say(walk, SHRINK, line, blocks, 0, 0.0, shape);
    blocks = blocks_of(walk, shape);
    i64 threads = threads_of(walk, shape);
    if (threads >= walk->limits->lanes && fills_warps(walk, threads)) {
      kept = propose(walk, line);
      kept_blocks = blocks;
    }
  }
  if (kept_blocks <= walk->limits->few_waves * units) longer_steps(walk, kept, walk->limits->doublings);
}

/* All tiles over a register tile. `least`: the smallest tile there is; `single`: axes that run one element at a time;
 * `menu`: the sizes of every axis. The number of tiles, which lines they are in `tiles`; -1 for more than `most` lines. */
i64 shared_tiles(const i64 *space, const i64 *limits, const double *rates, const i64 *least, const i64 *single,
                 const i64 *registers, const i64 *menu, i64 most, i64 *lines, double *scores, i64 *tiles) {
  Walk walk = {.space = space, .registers = registers, .least = least, .single = single,
               .limits = (const Limits *)limits, .rates = (const Rates *)rates,
               .most = most, .lines = lines, .tiles = tiles, .scores = scores};
  i64 axes = space[0], spatial = space[1], shape[AXES], held[AXES][2], capacity = walk.limits->capacity;
  const i64 *sizes[AXES];
  for (i64 a = 0; a < axes; a++) {
    sizes[a] = menu;
    shape[a] = menu[1];
    menu += 1 + menu[0];
  }
  for (i64 a = axes - 1; a >= spatial; a--) {
    for (i64 entry = 1; entry <= sizes[a][0]; entry++) {
      i64 points = 1, now = shape[a];
      for (i64 r = spatial; r < axes; r++) points *= shape[r];
      if (points >= walk.limits->step_points) break;
      shape[a] = sizes[a][entry];
      if (costs(space, shape).held > capacity) shape[a] = now;
    }
  }
  while (costs(space, shape).held > capacity && halve_step(&walk, shape, sizes, held)) continue;
  for (i64 a = 0; a < axes; a++) {
    if (can_save(space, a, sizes[a])) continue;
    held[a][0] = 1, held[a][1] = shape[a];
    sizes[a] = held[a];
  }
  i64 line = say(&walk, START, -1, 0, 0, 0.0, shape), largest = line, saturated = 0;
  i64 kept[AXES * 64], kept_count = 0, tail = walk.limits->tail, most_threads = walk.limits->threads_per_block;
  i64 least_threads = 2 * walk.limits->lanes < most_threads ? 2 * walk.limits->lanes : most_threads;
  Costs now = costs(space, shape);
  while (saturated < tail && walk.count < most) {
    i64 threads = threads_of(&walk, shape), *last = kept_count ? kept + kept_count - 1 : 0;
    const i64 *last_shape = last ? lines + *last * (axes + 4) + 4 : 0;
    if (threads > most_threads) {
      if (last) *last = say(&walk, THREADS, *last, threads, most_threads, 0.0, last_shape);
      break;
    }
    largest = line;
    if (threads >= least_threads && fills_warps(&walk, threads)) {
      double seconds = now.traffic / walk.rates->bandwidth;
      i64 fed = seconds == 0.0 || walk.rates->work / seconds >= walk.rates->compute;
      if (kept_count == AXES * 64) return -1;
      kept[kept_count++] = say(&walk, fed ? FED : SLOW, line, threads, 0, 0.0, shape);
      saturated += fed;
    }
    Step blocked, step = best_step(space, shape, sizes, now, 1, capacity, 0, &blocked);
    if (step.axis >= 0) {
      shape[step.axis] = step.size;
      now = step.costs;
      line = say(&walk, GROW, line, step.axis, 0, step.score, shape);
    } else if (!kept_count && halve_step(&walk, shape, sizes, held)) {
      now = costs(space, shape);
      line = say(&walk, SHORTEN, line, 0, 0, 0.0, shape);
    } else {
      if (!kept_count) break;
      last = kept + kept_count - 1;
      last_shape = lines + *last * (axes + 4) + 4;
      *last = blocked.axis < 0 ? say(&walk, SATED, *last, 0, 0, 0.0, last_shape)
                               : say(&walk, BLOCKED, *last, blocked.axis, blocked.size, (double)blocked.costs.held, last_shape);
      break;
    }
  }
  if (!kept_count) kept[kept_count++] = largest;
  for (i64 k = kept_count > tail ? kept_count - tail : 0; k < kept_count && walk.count < most; k++) fit_device(&walk, kept[k]);
  return walk.count < most ? walk.tile_count : -1;
}
