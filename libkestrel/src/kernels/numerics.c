/*
 * numerics.c - exp, log, sin and cos in double precision for tables that must be equal everywhere.
 *
 * IEEE 754 fixes the result of + - * / and nothing else; so these functions consist of those four.
 * They run once per table entry, not per token, and are written for clarity: series long enough
 * that the first neglected term is below half an ulp.
 */
#include "numerics.h"

/* Nearest integer of x as a double, |x| < 2^51: adding 1.5 * 2^52 leaves no fraction bits. */
static double round_to_integer(double x)
{
    const double magic = 6755399441055744.0;
    return (x + magic) - magic;
}

double ks_exp(double x)
{
    /* ln 2 in two parts, the first with enough trailing zeros for n * part to be exact */
    const double log2_e = 1.4426950408889634, ln2_hi = 0.693147180369123816490;
    const double ln2_lo = 1.90821492927058770002e-10;
    double n = round_to_integer(x * log2_e);
    double r = (x - n * ln2_hi) - n * ln2_lo;
    double sum = 1.0;
    for (int k = 18; k >= 1; k--)
        sum = 1.0 + sum * r / k;
    return sum * ks_f64_from_bits((uint64_t)(1023 + (int64_t)n) << 52);
}

double ks_log(double x)
{
    uint64_t bits = ks_f64_bits(x);
    int exponent = (int)(bits >> 52) - 1023;
    double m = ks_f64_from_bits((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    /* ln m = 2 artanh t with |t| <= 0.172 */
    double t = (m - 1.0) / (m + 1.0), t_squared = t * t, sum = 0.0;
    for (int k = 41; k >= 1; k -= 2)
        sum = sum * t_squared + 1.0 / k;
    return 2.0 * t * sum + exponent * 0.69314718055994531;
}

void ks_sincos(double x, double *sine, double *cosine)
{
    /* pi/2 in three parts of 33 bits, so that n * part is exact for n < 2^20 */
    const double part1 = 1.57079632673412561417, part2 = 6.07710050630396597660e-11;
    const double part3 = 2.02226624879595063154e-21, two_over_pi = 0.63661977236758134;
    double n = round_to_integer(x * two_over_pi);
    double r = ((x - n * part1) - n * part2) - n * part3;
    double r_squared = r * r, s = 1.0, c = 1.0;
    for (int k = 21; k >= 3; k -= 2)
        s = 1.0 - s * r_squared / (double)(k * (k - 1));
    for (int k = 20; k >= 2; k -= 2)
        c = 1.0 - c * r_squared / (double)(k * (k - 1));
    s *= r;
    const double quadrant_sine[4] = {s, c, -s, -c}, quadrant_cosine[4] = {c, -s, -c, s};
    *sine = quadrant_sine[(int64_t)n & 3];
    *cosine = quadrant_cosine[(int64_t)n & 3];
}
