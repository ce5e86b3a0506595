//! LU decomposition in place, right-looking, without pivoting: the matrix is diagonally dominant.
//!
//! Step k divides column k below the diagonal by the pivot and subtracts its outer product with row
//! k from the rows below. Row i belongs to thread i modulo the number of threads, so that all
//! threads have work until the end.

use super::{Kernel, Matrix, MatrixShape, Scale, input, vectorised};

/// The kernel.
#[derive(Debug, Clone, Copy)]
pub struct Lu {
    order: usize,
}

impl Lu {
    /// A matrix of `scale.rows` rows and columns.
    pub const fn new(scale: Scale) -> Self {
        Self { order: scale.rows }
    }
}

impl Kernel for Lu {
    fn matrices(&self) -> Vec<MatrixShape> {
        vec![MatrixShape { len_bytes: self.order * self.order * 8, changes: true }]
    }

    unsafe fn initialise(&self, memory: &[*mut u8]) {
        let matrix = Matrix::<f64>::new(memory[0], self.order);
        for row in 0..self.order {
            // SAFETY: a row of the matrix, which only this call accesses.
            let values = unsafe { matrix.row_mut(row) };
            for (column, value) in values.iter_mut().enumerate() {
                *value = f64::from(input(1, row, column)) / 1000.0;
            }
            values[row] += self.order as f64;
        }
    }

    fn steps(&self, _threads: usize) -> usize {
        self.order.saturating_sub(1)
    }

    unsafe fn step(&self, memory: &[*mut u8], step: usize, thread: usize, threads: usize) {
        let matrix = Matrix::<f64>::new(memory[0], self.order);
        // SAFETY: in this step all threads only read the pivot row.
        let pivot = unsafe { matrix.row(step) };
        let first = step + 1 + (thread + threads - (step + 1) % threads) % threads;
        for row in (first..self.order).step_by(threads) {
            // SAFETY: in this step only this thread accesses the rows congruent to `thread`.
            let values = unsafe { matrix.row_mut(row) };
            let factor = values[step] / pivot[step];
            values[step] = factor;
            subtract_scaled(&mut values[step + 1..], &pivot[step + 1..], factor);
        }
    }
}

vectorised! {
    /// `values -= factor * pivot`.
    fn subtract_scaled(values: &mut [f64], pivot: &[f64], factor: f64) {
        for (value, pivot) in values.iter_mut().zip(pivot) {
            *value -= factor * pivot;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::run;

    #[test]
    fn the_factors_multiply_to_the_matrix() {
        let order = 48;
        let lu = Lu::new(Scale { rows: order, columns: order, width: 0 });
        let factors: Vec<f64> = run(&lu, 2)[0].iter().map(|&bits| f64::from_bits(bits)).collect();
        for row in 0..order {
            for column in 0..order {
                let lower =
                    |inner: usize| if inner == row { 1.0 } else { factors[row * order + inner] };
                let product: f64 = (0..=row.min(column))
                    .map(|inner| lower(inner) * factors[inner * order + column])
                    .sum();
                let dominant = if row == column { order as f64 } else { 0.0 };
                let expected = f64::from(input(1, row, column)) / 1000.0 + dominant;
                assert!((product - expected).abs() < 1e-9, "{row}, {column}: {product}");
            }
        }
    }
}
