"""The papers behind the library, as entries of a bibliography."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PAPERS", "Paper"]


class Paper(NamedTuple):
    """One entry of a bibliography."""

    kind: str
    author: str
    title: str
    year: int
    where: str = ""
    arxiv: str = ""

    def bibtex(self, key: str) -> str:
        """As a BibTeX entry under ``key``."""
        venue = {"inproceedings": "booktitle", "article": "journal"}.get(self.kind, "howpublished")
        fields = [("author", self.author), ("title", f"{{{self.title}}}"), ("year", str(self.year))]
        fields += [(venue, self.where)] if self.where else []
        fields += [("eprint", self.arxiv), ("archiveprefix", "arXiv")] if self.arxiv else []
        return f"@{self.kind}{{{key},\n" + "".join(f"  {name} = {{{value}}},\n" for name, value in fields) + "}"


_IN, _ART, _MISC = "inproceedings", "article", "misc"

PAPERS: dict[str, Paper] = {
    "abadi2016deep": Paper(
        _IN,
        "Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and Talwar, Kunal and Zhang, Li",
        "Deep Learning with Differential Privacy",
        2016,
        "ACM CCS",
        "1607.00133",
    ),
    "andrew2021adaptive": Paper(
        _IN,
        "Andrew, Galen and Thakkar, Om and McMahan, H. Brendan and Ramaswamy, Swaroop",
        "Differentially Private Learning with Adaptive Clipping",
        2021,
        "NeurIPS",
        "1905.03871",
    ),
    "balle2018improving": Paper(
        _IN,
        "Balle, Borja and Wang, Yu-Xiang",
        "Improving the {Gaussian} Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising",
        2018,
        "ICML",
        "1805.06530",
    ),
    "balle2018subsampling": Paper(
        _IN,
        "Balle, Borja and Barthe, Gilles and Gaboardi, Marco",
        "Privacy Amplification by Subsampling: Tight Analyses via Couplings and Divergences",
        2018,
        "NeurIPS",
        "1807.01647",
    ),
    "bassily2014private": Paper(
        _IN,
        "Bassily, Raef and Smith, Adam and Thakurta, Abhradeep",
        "Private Empirical Risk Minimization: Efficient Algorithms and Tight Error Bounds",
        2014,
        "FOCS",
        "1405.7085",
    ),
    "bu2023automatic": Paper(
        _IN,
        "Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George",
        "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
        2023,
        "NeurIPS",
        "2206.07136",
    ),
    "bun2016concentrated": Paper(
        _IN,
        "Bun, Mark and Steinke, Thomas",
        "Concentrated Differential Privacy: Simplifications, Extensions, and Lower Bounds",
        2016,
        "TCC",
        "1605.02065",
    ),
    "canonne2020discrete": Paper(
        _IN,
        "Canonne, Clement L. and Kamath, Gautam and Steinke, Thomas",
        "The Discrete {Gaussian} for Differential Privacy",
        2020,
        "NeurIPS",
        "2004.00010",
    ),
    "choquette2023amplified": Paper(
        _IN,
        "Choquette-Choo, Christopher A. and others",
        "({Amplified}) Banded Matrix Factorization: A Unified Approach to Private Training",
        2023,
        "NeurIPS",
        "2306.08153",
    ),
    "choquette2024correlated": Paper(
        _IN,
        "Choquette-Choo, Christopher A. and Dvijotham, Krishnamurthy and Pillutla, Krishna and others",
        "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning",
        2024,
        "ICLR",
        "2310.06771",
    ),
    "chua2025balls": Paper(_IN, "Chua, Lynn and others", "Balls-and-Bins Sampling for {DP-SGD}", 2025, "AISTATS", "2412.16802"),
    "chua2024scalable": Paper(
        _IN,
        "Chua, Lynn and Ghazi, Badih and Kamath, Pritish and Kumar, Ravi and Manurangsi, Pasin and Sinha, Amer and Zhang, Chiyuan",
        "Scalable {DP-SGD}: Shuffling vs. {Poisson} Subsampling",
        2024,
        "NeurIPS",
        "2411.04205",
    ),
    "de2022unlocking": Paper(
        _MISC,
        "De, Soham and Berrada, Leonard and Hayes, Jamie and Smith, Samuel L. and Balle, Borja",
        "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
        2022,
        arxiv="2204.13650",
    ),
    "denisov2022improved": Paper(
        _IN,
        "Denisov, Sergey and McMahan, H. Brendan and Rush, Keith and Smith, Adam and Thakurta, Abhradeep",
        "Improved Differential Privacy for {SGD} via Optimal Private Linear Operators on Adaptive Streams",
        2022,
        "NeurIPS",
        "2202.08312",
    ),
    "dong2022gaussian": Paper(
        _ART,
        "Dong, Jinshuo and Roth, Aaron and Su, Weijie J.",
        "{Gaussian} Differential Privacy",
        2022,
        "Journal of the Royal Statistical Society Series B",
        "1905.02383",
    ),
    "donoho1995denoising": Paper(
        _ART, "Donoho, David L.", "De-Noising by Soft-Thresholding", 1995, "IEEE Transactions on Information Theory"
    ),
    "doroshenko2022connect": Paper(
        _ART,
        "Doroshenko, Vadym and Ghazi, Badih and Kamath, Pritish and Kumar, Ravi and Manurangsi, Pasin",
        "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions",
        2022,
        "Proceedings on Privacy Enhancing Technologies",
        "2207.04380",
    ),
    "dvijotham2024efficient": Paper(
        _IN,
        "Dvijotham, Krishnamurthy and McMahan, H. Brendan and Pillutla, Krishna and Steinke, Thomas and Thakurta, Abhradeep",
        "Efficient and Near-Optimal Noise Generation for Streaming Differential Privacy",
        2024,
        "FOCS",
        "2404.16706",
    ),
    "dwork2014foundations": Paper(
        _ART,
        "Dwork, Cynthia and Roth, Aaron",
        "The Algorithmic Foundations of Differential Privacy",
        2014,
        "Foundations and Trends in Theoretical Computer Science",
    ),
    "fichtenberger2023constant": Paper(
        _IN,
        "Fichtenberger, Hendrik and Henzinger, Monika and Upadhyay, Jalaj",
        "Constant Matters: Fine-grained Error Bound on Differentially Private Continual Observation",
        2023,
        "ICML",
        "2202.11205",
    ),
    "honaker2015efficient": Paper(
        _MISC, "Honaker, James", "Efficient Use of Differentially Private Binary Trees", 2015, "Theory and Practice of DP (TPDP)"
    ),
    "kairouz2015composition": Paper(
        _IN,
        "Kairouz, Peter and Oh, Sewoong and Viswanath, Pramod",
        "The Composition Theorem for Differential Privacy",
        2015,
        "ICML",
        "1311.0776",
    ),
    "johnson2013accelerating": Paper(
        _IN,
        "Johnson, Rie and Zhang, Tong",
        "Accelerating Stochastic Gradient Descent using Predictive Variance Reduction",
        2013,
        "NeurIPS",
    ),
    "kairouz2021practical": Paper(
        _IN,
        "Kairouz, Peter and McMahan, H. Brendan and Song, Shuang and Thakkar, Om and Thakurta, Abhradeep and Xu, Zheng",
        "Practical and Private (Deep) Learning without Sampling or Shuffling",
        2021,
        "ICML",
        "2103.00039",
    ),
    "kalinin2024banded": Paper(
        _IN,
        "Kalinin, Nikita P. and Lampert, Christoph H.",
        "Banded Square Root Matrix Factorization for Differentially Private Model Training",
        2024,
        "NeurIPS",
        "2405.13763",
    ),
    "kalinin2026back": Paper(
        _IN,
        "Kalinin, Nikita P. and McKenna, Ryan and Upadhyay, Jalaj and Lampert, Christoph H.",
        "Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for Multi-Epoch Differentially Private {SGD}",
        2026,
        "ICLR",
        "2505.12128",
    ),
    "kalinin2026lambda": Paper(
        _IN,
        "Kalinin, Nikita P. and McKenna, Ryan and Pagh, Rasmus and Lampert, Christoph H.",
        "{DP-$\\lambda$CGD}: Efficient Noise Correlation for Differentially Private Model Training",
        2026,
        "ICML",
        "2601.22334",
    ),
    "mcmahan2018learning": Paper(
        _IN,
        "McMahan, H. Brendan and Ramage, Daniel and Talwar, Kunal and Zhang, Li",
        "Learning Differentially Private Recurrent Language Models",
        2018,
        "ICLR",
        "1710.06963",
    ),
    "mironov2017renyi": Paper(_IN, "Mironov, Ilya", "{R{\\'e}nyi} Differential Privacy", 2017, "IEEE CSF", "1702.07476"),
    "mironov2019sampled": Paper(
        _MISC,
        "Mironov, Ilya and Talwar, Kunal and Zhang, Li",
        "{R{\\'e}nyi} Differential Privacy of the Sampled {Gaussian} Mechanism",
        2019,
        arxiv="1908.10530",
    ),
    "murtagh2016complexity": Paper(
        _IN,
        "Murtagh, Jack and Vadhan, Salil",
        "The Complexity of Computing the Optimal Composition of Differential Privacy",
        2016,
        "TCC",
        "1507.03113",
    ),
    "orvieto2022anticorrelated": Paper(
        _IN,
        "Orvieto, Antonio and Kersting, Hans and Proske, Frank and Bach, Francis and Lucchi, Aurelien",
        "Anticorrelated Noise Injection for Improved Generalization",
        2022,
        "ICML",
        "2202.02831",
    ),
    "papernot2022tuning": Paper(
        _IN,
        "Papernot, Nicolas and Steinke, Thomas",
        "Hyperparameter Tuning with {R\\'enyi} Differential Privacy",
        2022,
        "ICLR",
        "2110.03620",
    ),
    "polyak1992acceleration": Paper(
        _ART,
        "Polyak, Boris T. and Juditsky, Anatoli B.",
        "Acceleration of Stochastic Approximation by Averaging",
        1992,
        "SIAM Journal on Control and Optimization",
    ),
    "rakhlin2012making": Paper(
        _IN,
        "Rakhlin, Alexander and Shamir, Ohad and Sridharan, Karthik",
        "Making Gradient Descent Optimal for Strongly Convex Stochastic Optimization",
        2012,
        "ICML",
        "1109.5647",
    ),
    "sommer2019privacy": Paper(
        _ART,
        "Sommer, David M. and Meiser, Sebastian and Mohammadi, Esfandiar",
        "Privacy Loss Classes: The Central Limit Theorem in Differential Privacy",
        2019,
        "Proceedings on Privacy Enhancing Technologies",
    ),
    "tang2024adambc": Paper(
        _IN,
        "Tang, Qiaoyue and Shpilevskiy, Frederick and L{\\'e}cuyer, Mathias",
        "{DP-AdamBC}: Your {DP-Adam} Is Actually {DP-SGD} (Unless You Apply Bias Correction)",
        2024,
        "AAAI",
        "2312.14334",
    ),
    "wang2017empirical": Paper(
        _IN,
        "Wang, Di and Ye, Minwei and Xu, Jinhui",
        "Differentially Private Empirical Risk Minimization Revisited: Faster and More General",
        2017,
        "NeurIPS",
        "1802.05251",
    ),
    "wang2020lssgd": Paper(
        _IN,
        "Wang, Bao and Gu, Quanquan and Boedihardjo, March and Wang, Lingxiao and Barekat, Farzin and Osher, Stanley J.",
        "{DP-LSSGD}: A Stochastic Optimization Method to Lift the Utility in Privacy-Preserving {ERM}",
        2020,
        "MSML",
        "1906.12056",
    ),
    "zhang2024disk": Paper(
        _MISC,
        "Zhang, Xinwei and others",
        "{DiSK}: Differentially Private Optimizer with Simplified {Kalman} Filter for Noise Reduction",
        2024,
        arxiv="2410.03883",
    ),
    "zhang2024doppler": Paper(
        _IN,
        "Zhang, Xinwei and Bu, Zhiqi and Hong, Mingyi and Razaviyayn, Meisam",
        "{DOPPLER}: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction",
        2024,
        "NeurIPS",
        "2408.13460",
    ),
}
