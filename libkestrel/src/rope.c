/*
 * rope.c - rotary position tables; see rope.h for why they are float32.
 *
 * No libm: exp, log, sin and cos come from numerics.c, so that a table entry is a function of the
 * configuration alone.
 */
#include "rope.h"

#include "kernels/numerics.h"

static const double PI = 3.14159265358979323846;

/* theta^(2j / head_dim), the wavelength of pair j over 2 pi, with the exponent rounded
 * to float32. */
static float rope_period(double theta, int head_dim, int j)
{
    float exponent = (float)(2 * j) / (float)head_dim;
    return (float)ks_exp((double)exponent * ks_log(theta));
}

/* ---- llama3: long wavelengths are stretched, short ones kept, a ramp between ----------------- */

static float llama3_frequency(const ks_rope_config *config, float frequency)
{
    float factor = (float)config->factor, low = (float)config->low_freq_factor;
    float original = (float)config->original_max_position;
    float band = (float)(config->high_freq_factor - config->low_freq_factor);
    float wavelength = (float)(2.0 * PI) / frequency;
    if (wavelength < (float)(config->original_max_position / config->high_freq_factor))
        return frequency;
    if (wavelength > (float)(config->original_max_position / config->low_freq_factor))
        return frequency / factor;
    float smooth = (original / wavelength - low) / band;
    return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

/* ---- yarn: pairs that turn often are kept, pairs that turn rarely are stretched -------------- */

/* The (fractional) pair index that makes `rotations` turns over the original context. */
static double yarn_pair_index(const ks_rope_config *config, int head_dim, double rotations)
{
    double turns = config->original_max_position / (rotations * 2.0 * PI);
    return head_dim * ks_log(turns) / (2.0 * ks_log(config->theta));
}

static double round_down(double x)
{
    double whole = (double)(int64_t)x;
    return whole > x ? whole - 1.0 : whole;
}

typedef struct yarn_ramp {
    float first;
    float width;
} yarn_ramp;

static yarn_ramp yarn_ramp_of(const ks_rope_config *config, int head_dim)
{
    double first = yarn_pair_index(config, head_dim, config->beta_fast);
    double last = yarn_pair_index(config, head_dim, config->beta_slow);
    if (config->truncate) {
        first = round_down(first);
        last = -round_down(-last);
    }
    first = first > 0.0 ? first : 0.0;
    last = last < head_dim - 1 ? last : head_dim - 1;
    if (first == last) last += 0.001; /* a step, but not a division by zero */
    yarn_ramp ramp = {(float)first, (float)(last - first)};
    return ramp;
}

static float yarn_frequency(const ks_rope_config *config, yarn_ramp ramp, float period, int j)
{
    float position = ((float)j - ramp.first) / ramp.width;
    position = position > 0.0f ? position : 0.0f;
    position = position < 1.0f ? position : 1.0f;
    float kept = 1.0f - position; /* the share of the unscaled frequency */
    float stretched = 1.0f / ((float)config->factor * period);
    return stretched * (1.0f - kept) + 1.0f / period * kept;
}

/* ---- tables ---------------------------------------------------------------------------------- */

void ks_rope_inv_freq(const ks_rope_config *config, int head_dim, float *inv_freq, float *factor)
{
    yarn_ramp ramp = {0.0f, 1.0f};
    if (config->type == KS_ROPE_YARN) ramp = yarn_ramp_of(config, head_dim);
    for (int j = 0; j < head_dim / 2; j++) {
        float period = rope_period(config->theta, head_dim, j);
        float frequency = 1.0f / period;
        switch (config->type) {
        case KS_ROPE_DEFAULT:
            break;
        case KS_ROPE_LINEAR:
            frequency = frequency / (float)config->factor;
            break;
        case KS_ROPE_LLAMA3:
            frequency = llama3_frequency(config, frequency);
            break;
        case KS_ROPE_YARN:
            frequency = yarn_frequency(config, ramp, period, j);
            break;
        }
        inv_freq[j] = frequency;
    }
    *factor = config->type == KS_ROPE_YARN ? (float)config->attention_factor : 1.0f;
}

void ks_rope_row(const float *inv_freq, float factor, int head_dim, int32_t position,
                 float *cos_sin)
{
    int half = head_dim / 2;
    for (int j = 0; j < half; j++) {
        float angle = (float)position * inv_freq[j];
        double sine, cosine;
        ks_sincos((double)angle, &sine, &cosine);
        cos_sin[j] = (float)cosine * factor;
        cos_sin[half + j] = (float)sine * factor;
    }
}
